"""The rendezvous of a run's processes: each chooses its device, and is connected to the others."""

import functools
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from accelerate_nb.runtime.compat.env_vars import is_yes, parse_flag_from_env
from accelerate_nb.runtime.world.world import RankPlace, World, make_default_group
from accelerate_nb.runtime.xla.device import is_requested
from accelerate_nb.runtime.xla.world import join_devices, store_of_devices
from accelerate_nb.user_warnings import warn_user


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
        if not self.cpu and is_requested(environment):
            return join_devices(environment, store or self.rendezvous, self._limit)
        rank_place = RankPlace.read(environment)
        device = choose_device(rank_place, environment, cpu=self.cpu)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            if is_yes(environment, "ACCELERATE_CPU_AFFINITY"):
                set_numa_affinity(device.index)
        if rank_place.local_size > 1 and device.type == "cpu" and not environment.get("OMP_NUM_THREADS"):
            # each process gets its part of the machine's cores, unless the number of threads is set
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            torch.set_num_threads(max(1, cores // rank_place.local_size))
        if rank_place.size > 1 and not dist.is_initialized():
            make_default_group(**self._group_arguments(rank_place, device, store))
        connected = dist.is_available() and dist.is_initialized()
        backend = dist.get_backend() if connected else None
        return World(**asdict(rank_place), device=device, backend=backend)

    def rendezvous(self) -> dist.Store:
        """The store of the processes' rendezvous, from `init_method` or the environment, else from torch_xla."""
        on_devices = self.init_method is None and not self.cpu and is_requested(os.environ)
        if on_devices and (found := store_of_devices(self._limit)) is not None:
            return found
        store, _, _ = next(iter(dist.rendezvous(self.init_method or "env://", **self._limit)))
        assert isinstance(store, dist.Store)
        return store

    @property
    def _limit(self) -> dict[str, Any]:
        """The timeout as an argument of torch's functions, which have defaults of their own."""
        return {} if self.timeout is None else {"timeout": self.timeout}

    def _group_arguments(
        self, rank_place: RankPlace, device: torch.device, store: Callable[[], dist.Store] | None
    ) -> dict[str, Any]:
        numbers = {"rank": rank_place.rank, "world_size": rank_place.size}
        rendezvous = {"init_method": self.init_method or "env://"} if store is None else {"store": store()}
        backend = self.backend
        if backend is None or (backend == "nccl" and device.type != "cuda"):
            backend = dist.get_default_backend_for_device(device)
        if self.backend not in {None, backend} and rank_place.rank == 0:
            warn_user(
                f"backend={self.backend!r} was requested, and it connects no {device.type.upper()}s: these {rank_place.size} processes are "
                f"connected by {backend!r}. Leave the backend out, or run on GPUs."
            )
        # else NCCL takes the device of the global rank's number, and makes a communicator anew for each smaller group
        bound = {"device_id": device} if device.type == "cuda" and "nccl" in backend else {}
        return {"backend": backend, **numbers, **self._limit, **rendezvous, **bound}


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
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
