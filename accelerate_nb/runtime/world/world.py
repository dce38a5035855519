"""This process among the processes of a run."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from accelerate_nb.errors import ConfigurationError, LaunchError
from accelerate_nb.runtime.compat.env_vars import is_yes, parse_flag_from_env
from accelerate_nb.runtime.world.mesh import Mesh
from accelerate_nb.runtime.xla import device as xla
from accelerate_nb.runtime.xla.deferred_values import deferred_queue
from accelerate_nb.user_warnings import warn_user

# The variables that torchrun gives to each process it starts; where they are set, a launcher has started a worker.
CONTRACT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


@dataclass(frozen=True, slots=True)
class World:
    """One process among the others: its rank, its local rank, its device, and its connection to them."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    backend: str | None
    # how the training of an `Accelerator` is spread over the ranks
    training_mesh: Mesh | None = None
    # of the ranks along an axis, the group that they talk over
    axis_group: Any = None

    @property
    def mesh(self) -> Mesh:
        """The degrees in which a training is spread over the ranks; copies of the model, where there is no `Accelerator`."""
        return self.training_mesh or Mesh(dp_replicate=self.size)

    @property
    def group(self) -> Any:
        """The process group over which ranks talk; `None` for one that is alone."""
        return self.axis_group or dist.group.WORLD

    @property
    def store(self) -> dist.Store:
        """The store of this group's rendezvous."""
        return dist.distributed_c10d._get_default_store()

    @property
    def exchange_world(self) -> World:
        """This world on the device that rows of bytes are sent from: its own, unless they travel between hosts."""
        return self

    @property
    def has_ended(self) -> bool:
        """Whether what connected the ranks is gone."""
        return self.backend is not None and not dist.is_initialized()

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
        """Wait until every process has called this; nothing to wait for where there is one."""
        if self.size == 1:
            return
        # nccl needs its device, or it guesses one from the rank, which is another rank's on a second machine
        dist.barrier(self.axis_group, device_ids=[self.device.index] if self.device.type == "cuda" else None)

    def settle(self) -> None:
        """Have the device begin with all pending work; most begin at once."""

    def when_computed(self, report: Callable[[Any], None], values: Any) -> None:
        """Call `report` with values, a nest of tensors and other things, when what they are now can be read without waiting."""
        report(values)

    def report_deferred(self) -> None:
        """Report the values that still wait for being computed; all processes call it."""


@dataclass(frozen=True, slots=True)
class XlaWorld(World):
    """
    A rank that computes through torch_xla.

    Ranks talk through their hosts, by gloo, which compiles nothing; their tensors move inside the programs of their devices.
    """

    @property
    def exchange_world(self) -> World:
        return replace(self, device=torch.device("cpu"))

    def settle(self) -> None:
        xla.sync()

    def when_computed(self, report: Callable[[Any], None], values: Any) -> None:
        deferred_queue().add(report, values)

    def report_deferred(self) -> None:
        deferred_queue().finish()


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The environment's numbers of this process, before it has a device or a group."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> RankPlace:
        """The process's numbers: those of an existing process group, else of torchrun's variables, else the only process."""
        if dist.is_available() and dist.is_initialized():
            rank, size = dist.get_rank(), dist.get_world_size()
        else:
            rank, size = _number(environment, "RANK", 0), _number(environment, "WORLD_SIZE", 1)
        rank_place = cls(
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
        return rank_place


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The rendezvous of a run's processes; what is `None` is chosen from the device and the environment."""

    cpu: bool = False
    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None

    def join(self, environment: Mapping[str, str], store: Callable[[], dist.Store] | None = None) -> World:
        """
        Join the world: choose this process's device and connect it to the others, where there are others.

        An existing process group is adopted as it is; otherwise one is made, over what `store` gives.
        """
        if not self.cpu and xla.is_requested(environment):
            return self._join_through_xla(environment, store or self.rendezvous)
        rank_place = RankPlace.read(environment)
        device = choose_device(rank_place, environment, cpu=self.cpu)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            if is_yes(environment, "ACCELERATE_CPU_AFFINITY"):
                set_numa_affinity(device.index)
        if rank_place.size > 1 and device.type == "cpu":
            _share_cores(rank_place, environment)
        if rank_place.size > 1 and not dist.is_initialized():
            make_default_group(**self._group_arguments(rank_place, device, store))
        connected = dist.is_available() and dist.is_initialized()
        backend = dist.get_backend() if connected else None
        return World(**asdict(rank_place), device=device, backend=backend)

    def _join_through_xla(self, environment: Mapping[str, str], store: Callable[[], dist.Store]) -> World:
        device = xla.device()
        if (devices := xla.devices_in_process()) > 1:
            raise LaunchError(
                f"torch_xla drives {devices} devices in this process, each by a thread, as on a TPU v2 or v3, but a rank is a process "
                "here. Launch with notebook_launcher or accelerate-nb launch on a TPU v4 or later, or set CPU_NUM_DEVICES=1."
            )
        rank_place = RankPlace.read(environment) if xla.device_type() == "CPU" else RankPlace(*xla.rank_numbers())
        _must_be_whole(rank_place, environment)
        if rank_place.size > 1 and not dist.is_initialized():
            if xla.is_among_machines(environment):
                # a launch on one machine keeps to its loopback interface, which no other machine reaches
                os.environ["GLOO_SOCKET_IFNAME"] = xla.pod_interface()
            timeout = {} if self.timeout is None else {"timeout": self.timeout}
            make_default_group(
                backend="gloo", rank=rank_place.rank, world_size=rank_place.size, store=store(), **timeout
            )
        return XlaWorld(**asdict(rank_place), device=device, backend="xla" if rank_place.size > 1 else None)

    def rendezvous(self) -> dist.Store:
        """The store of the processes' rendezvous, from `init_method` or the environment, else from torch_xla."""
        if self.init_method is None and not self.cpu and xla.is_requested(os.environ):
            if "MASTER_ADDR" not in os.environ:
                return xla.rendezvous_store(self.timeout)
            if xla.is_among_machines(os.environ):
                return xla.pod_rendezvous_store(self.timeout)
        timeout: dict[str, Any] = {} if self.timeout is None else {"timeout": self.timeout}
        store, _, _ = next(iter(dist.rendezvous(self.init_method or "env://", **timeout)))
        assert isinstance(store, dist.Store)
        return store

    def _group_arguments(
        self, rank_place: RankPlace, device: torch.device, store: Callable[[], dist.Store] | None
    ) -> dict[str, Any]:
        numbers = {"rank": rank_place.rank, "world_size": rank_place.size}
        timeout = {} if self.timeout is None else {"timeout": self.timeout}
        rendezvous = {"init_method": self.init_method or "env://"} if store is None else {"store": store()}
        backend = self._backend_for(device)
        if self.backend not in {None, backend} and rank_place.rank == 0:
            warn_user(
                f"backend={self.backend!r} was requested, and it connects no {device.type.upper()}s: these {rank_place.size} processes are "
                f"connected by {backend!r}. Leave the backend out, or run on GPUs."
            )
        # else NCCL takes the device of the global rank's number, and makes a communicator anew for each smaller group
        bound = {"device_id": device} if device.type == "cuda" and "nccl" in backend else {}
        return {"backend": backend, **numbers, **timeout, **rendezvous, **bound}

    def _backend_for(self, device: torch.device) -> str:
        natural = dist.get_default_backend_for_device(device)
        if self.backend is None or (self.backend == "nccl" and device.type != "cuda"):
            return natural
        return self.backend


def make_default_group(**arguments: Any) -> None:
    """`torch.distributed.init_process_group` with these arguments."""
    dist.init_process_group(**arguments)
    if (device := arguments.get("device_id")) is not None and dist.group.WORLD is not None:
        # a default group that is not the process's first has no list of its ranks, and reads past its end when it is split
        # (`groupRanks` of ProcessGroupNCCL.cpp, torch 2.11): a device mesh would end the process
        backend: Any = dist.group.WORLD._get_backend(device)
        backend.options.global_ranks_in_group = list(range(dist.get_world_size()))


def choose_device(rank_place: RankPlace, environment: Mapping[str, str], *, cpu: bool) -> torch.device:
    """The device of a process: the CPU if that is requested, else the accelerator of its local rank, else the CPU."""
    if cpu:
        return torch.device("cpu")
    if named := environment.get("ACCELERATE_TORCH_DEVICE"):
        return torch.device(named)
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or (found.type == "mps" and rank_place.size > 1):
        return torch.device("cpu")
    if found.type == "mps":
        return torch.device("mps")
    # where a scheduler shows each process only its own devices, local rank 3 may see one device
    return torch.device(found.type, rank_place.local_rank % torch.accelerator.device_count())


def _must_be_whole(rank_place: RankPlace, environment: Mapping[str, str]) -> None:
    """Ranks whose devices torch_xla doesn't connect would each train by themselves, and say that they are the first."""
    started = _number(environment, "WORLD_SIZE", 1)
    if started > rank_place.size:
        raise LaunchError(
            f"{started} processes were started (WORLD_SIZE), but torch_xla knows of {rank_place.size} rank(s): what PJRT_DEVICE="
            f"{environment.get('PJRT_DEVICE')} names is not shared among processes. Start one process, or pass cpu=True."
        )


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


def _share_cores(rank_place: RankPlace, environment: Mapping[str, str]) -> None:
    """Give each process its part of the machine's cores, unless the number of threads is set."""
    if environment.get("OMP_NUM_THREADS") or rank_place.local_size == 1:
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // rank_place.local_size))


_DEVICES = Path("/sys/bus/pci/devices")

_log = logging.getLogger("accelerate_nb.utils.environment")


@functools.cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the cores near the GPU of its local rank, at the first call for this rank."""
    override_numa_affinity(local_process_index, verbose)


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """
    Bind this process to the cores near the GPU of its local rank; nothing happens where there is no GPU, or none are near.

    `verbose` logs them; without it `ACCELERATE_DEBUG_MODE` decides.
    """
    if not torch.cuda.is_available():
        return
    properties: Any = torch.cuda.get_device_properties(local_process_index)
    if not hasattr(properties, "pci_bus_id"):
        return  # this torch doesn't report where its GPU sits
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    cores = near(_DEVICES / address) & os.sched_getaffinity(0)
    if not cores:
        return
    os.sched_setaffinity(0, cores)
    if parse_flag_from_env("ACCELERATE_DEBUG_MODE") if verbose is None else verbose:
        _log.info("Assigning %s cpu cores to process %s: %s", len(cores), local_process_index, sorted(cores))


def near(device: Path) -> set[int]:
    """The cores that the kernel lists as local to a device; none where it lists none."""
    try:
        text = (device / "local_cpulist").read_text(encoding="ascii")
    except OSError:
        return set()
    return {core for part in text.strip().split(",") if part for core in _cores(part)}


def _cores(part: str) -> range:
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)
