"""Who this process is among the processes of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from accelerate_nb.errors import ConfigurationError, LaunchError
from accelerate_nb.runtime import xla
from accelerate_nb.runtime.affinity import set_numa_affinity
from accelerate_nb.runtime.environment import is_yes
from accelerate_nb.runtime.sharding import plan, spmd

# The variables that torchrun gives to each process it starts; whoever sets them has started a worker.
CONTRACT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


@dataclass(frozen=True, slots=True)
class World:
    """One process's place: its rank among all, its rank on its machine, its device, and what connects it to the others."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    backend: str | None
    # what connects ranks whose devices torch.distributed knows nothing of, through their hosts
    hosts: Any = None

    @property
    def group(self) -> Any:
        """The process group over which ranks talk; `None` for one that is alone."""
        return self.hosts if self.hosts is not None else dist.group.WORLD

    @property
    def has_ended(self) -> bool:
        """Whether what connected the ranks is gone."""
        return self.backend is not None and self.hosts is None and not dist.is_initialized()

    @property
    def is_main(self) -> bool:
        """Whether this is the first process of all."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.local_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the last process of all."""
        return self.rank == self.size - 1

    def barrier(self) -> None:
        """Wait until every process has come here; nothing to wait for where there is one."""
        if self.size == 1:
            return
        if self.hosts is not None:
            self.hosts.barrier().wait()
            return
        # nccl must be told its device, or it guesses one from the rank, which is another rank's on a second machine
        dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)


@dataclass(frozen=True, slots=True)
class Place:
    """What the environment says of this process, before it has a device or a group."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Place:
        """The process's place: that of an existing process group, else of torchrun's variables, else the only process."""
        if dist.is_available() and dist.is_initialized():
            rank, size = dist.get_rank(), dist.get_world_size()
        else:
            rank, size = _number(environment, "RANK", 0), _number(environment, "WORLD_SIZE", 1)
        place = cls(
            rank=rank,
            size=size,
            local_rank=_number(environment, "LOCAL_RANK", rank),
            local_size=_number(environment, "LOCAL_WORLD_SIZE", size),
        )
        if not 0 <= rank < size:
            raise LaunchError(
                f"RANK={rank} was given with WORLD_SIZE={size}, and ranks count from 0 to {size - 1}. "
                "Start the processes with a launcher, or correct the two variables."
            )
        return place


@dataclass(frozen=True, slots=True)
class Meeting:
    """How the processes of a run find each other; what is `None` is chosen from the device and the environment."""

    cpu: bool = False
    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None
    xla_mesh: str | None = None

    def join(self, environment: Mapping[str, str], store: dist.Store | None = None) -> World:
        """
        Take this process's place: choose its device and connect it to the others, where there are others.

        An existing process group is adopted as it is; otherwise one is made, over `store` where one is given.
        """
        if not self.cpu and xla.is_asked(environment):
            return self._join_through_xla(environment, store)
        place = Place.read(environment)
        device = choose_device(place, environment, cpu=self.cpu)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            if is_yes(environment, "ACCELERATE_CPU_AFFINITY"):
                set_numa_affinity(device.index)
        if place.size > 1 and device.type == "cpu":
            _share_cores(place, environment)
        if place.size > 1 and not dist.is_initialized():
            dist.init_process_group(**self._group_arguments(place, device, store))
        connected = dist.is_available() and dist.is_initialized()
        backend = dist.get_backend() if connected else None
        return World(place.rank, place.size, place.local_rank, place.local_size, device, backend)

    def _join_through_xla(self, environment: Mapping[str, str], store: dist.Store | None) -> World:
        if mesh := self.xla_mesh or environment.get(plan.VARIABLE):
            spmd.begin(mesh)
        device = xla.device()
        rank, size, local_rank, local_size = xla.place()
        if size == 1:
            return World(rank, size, local_rank, local_size, device, None)
        hosts = dist.ProcessGroupGloo(store or self.rendezvous(), rank, size, self.timeout or timedelta(minutes=30))
        return World(rank, size, local_rank, local_size, device, "xla", hosts)

    def rendezvous(self) -> dist.Store:
        """The store over which the processes meet, from the environment or from `init_method`."""
        timeout: dict[str, Any] = {} if self.timeout is None else {"timeout": self.timeout}
        store, _, _ = next(iter(dist.rendezvous(self.init_method or "env://", **timeout)))
        assert isinstance(store, dist.Store)
        return store

    def _group_arguments(self, place: Place, device: torch.device, store: dist.Store | None) -> dict[str, Any]:
        arguments: dict[str, Any] = {"backend": self._backend_for(device), "rank": place.rank, "world_size": place.size}
        if self.timeout is not None:
            arguments["timeout"] = self.timeout
        if store is not None:
            arguments["store"] = store
        else:
            arguments["init_method"] = self.init_method or "env://"
        return arguments

    def _backend_for(self, device: torch.device) -> str:
        natural = dist.get_default_backend_for_device(device)
        # "nccl" is the default of InitProcessGroupKwargs, written by people who never thought of a machine without GPUs
        if self.backend is None or (self.backend == "nccl" and device.type != "cuda"):
            return natural
        return self.backend


def choose_device(place: Place, environment: Mapping[str, str], *, cpu: bool) -> torch.device:
    """The device of a process: the CPU if that is asked for, else the accelerator of its local rank, else the CPU."""
    if cpu:
        return torch.device("cpu")
    if named := environment.get("ACCELERATE_TORCH_DEVICE"):
        return torch.device(named)
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or (found.type == "mps" and place.size > 1):
        return torch.device("cpu")
    if found.type == "mps":
        return torch.device("mps")
    # where a scheduler shows each process only its own devices, local rank 3 may see one device
    return torch.device(found.type, place.local_rank % torch.accelerator.device_count())


def _number(environment: Mapping[str, str], name: str, otherwise: int) -> int:
    text = environment.get(name)
    if text is None or text == "":
        return otherwise
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(
            f"The environment variable {name} should be a whole number, but is {text!r}. Correct or remove it."
        ) from None


def _share_cores(place: Place, environment: Mapping[str, str]) -> None:
    """Give each process its part of the machine's cores, unless the person has said how many threads there should be."""
    if environment.get("OMP_NUM_THREADS") or place.local_size == 1:
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // place.local_size))
