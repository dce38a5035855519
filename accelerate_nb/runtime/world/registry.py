"""The world that this process has joined: its rendezvous with the others, and its process groups, also after a failure."""

import gc
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.compat.env_vars import is_yes, set_numa_affinity
from accelerate_nb.runtime.world.world import Axis, Mesh, World, make_default_group, rank_numbers
from accelerate_nb.runtime.xla.device import is_requested
from accelerate_nb.runtime.xla.world import join_devices, store_of_devices
from accelerate_nb.user_warnings import warn_user

# What torchrun gives to each process that it starts; where they are set, a launcher has started a worker.
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The rendezvous of a run's processes; what is `None` is chosen from the device and the environment."""

    cpu: bool = False
    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None
    # more arguments of torch's `init_process_group`: `pg_options` and `device_id`
    others: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def join(self, environment: Mapping[str, str], store: Callable[[], dist.Store] | None = None) -> World:
        """Join the world: choose this process's device, and adopt the process group that is there, or make one over `store`'s."""
        if not self.cpu and is_requested(environment):
            return join_devices(environment, store or self.rendezvous, self._limit)
        rank, size, local_rank, local_size = numbers = rank_numbers(environment)
        device = choose_device(size, local_rank, environment, cpu=self.cpu)
        if device.type == "cuda":
            if device.index is not None:  # ACCELERATE_TORCH_DEVICE=cuda has none
                torch.cuda.set_device(device)
            if is_yes(environment, "ACCELERATE_CPU_AFFINITY"):
                set_numa_affinity(device.index)
        if local_size > 1 and device.type == "cpu" and not environment.get("OMP_NUM_THREADS"):
            # each process gets its part of the machine's cores, unless the number of threads is set
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            torch.set_num_threads(max(1, cores // local_size))
        if size > 1 and not dist.is_initialized():
            make_default_group(**self._group_arguments(rank, size, device, store))
        connected = dist.is_available() and dist.is_initialized()
        return World(*numbers, device=device, backend=dist.get_backend() if connected else None)

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
        self, rank: int, size: int, device: torch.device, store: Callable[[], dist.Store] | None
    ) -> dict[str, Any]:
        rendezvous = {"init_method": self.init_method or "env://"} if store is None else {"store": store()}
        backend = self.backend
        if backend is None or (backend == "nccl" and device.type != "cuda"):
            backend = dist.get_default_backend_for_device(device)
        if self.backend not in {None, backend} and rank == 0:
            warn_user(
                f"backend={self.backend!r} was requested, and it connects no {device.type.upper()}s: these {size} processes are "
                f"connected by {backend!r}. Leave the backend out, or run on GPUs."
            )
        # else NCCL takes the device of the global rank's number, and makes a communicator anew for each smaller group
        bound = {"device_id": device} if device.type == "cuda" and "nccl" in backend else {}
        return {
            "backend": backend,
            "rank": rank,
            "world_size": size,
            **self._limit,
            **rendezvous,
            **bound,
            **self.others,
        }


def choose_device(size: int, local_rank: int, environment: Mapping[str, str], *, cpu: bool) -> torch.device:
    """The device of a process: the CPU if that is requested, else the accelerator of its local rank, else the CPU."""
    if cpu:
        return torch.device("cpu")
    if named := environment.get("ACCELERATE_TORCH_DEVICE"):
        return torch.device(named)
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type == "mps":
        return torch.device("cpu" if found is None or size > 1 else "mps")
    # where a scheduler shows each process only its own devices, local rank 3 may see one device
    return torch.device(found.type, local_rank % torch.accelerator.device_count())


class Generation:
    """One of the worlds that processes have joined, as a mark on what was made in it; copies keep the mark, pickles lose it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Generation":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # the same in each run, and loads where this package is not installed
        return str, ()


@dataclass(eq=False)
class _WorldState:
    """The world that this process has joined, and what goes with it."""

    world: World | None = None
    rendezvous: Rendezvous = field(default_factory=Rendezvous)
    # its training is over, and with it the process group that was made here; the world is still known
    is_ended: bool = False
    made_group: bool = False
    store: dist.Store | None = None
    joins: int = 0
    generation: Generation = field(default_factory=Generation)
    pid: int = 0
    contract: tuple[str | None, ...] = ()
    shared: dict[str, dict[str, Any]] = field(default_factory=dict)
    lasting: dict[str, dict[str, Any]] = field(default_factory=dict)
    exit_callbacks: list[Callable[[], None]] = field(default_factory=list)
    # the process groups of the ranks along axes of the mesh
    axis_groups: dict[tuple[str, ...], Any] = field(default_factory=dict)


@dataclass(eq=False, kw_only=True)
class SharedState:
    """A class attribute: the dictionary which all instances of its class share (Hugging Face's `_shared_state`)."""

    # When the world is left, old instances keep what they knew; of a lasting dictionary they are emptied, and go on with the new.
    lasting: bool = False

    def __get__(self, instance: object, owner: type) -> dict[str, Any]:
        if _held.world is not None and _is_stale():
            _leave_behind()
        return (_held.lasting if self.lasting else _held.shared).setdefault(owner.__name__, {})


_held = _WorldState()


def current_world(rendezvous: Rendezvous | None = None) -> World:
    """This process's world; it is joined through `rendezvous` at the first call."""
    if _held.world is None or _is_stale():
        _leave_behind()
        _claim()
        _held.rendezvous = rendezvous = rendezvous or Rendezvous()
        existed = dist.is_available() and dist.is_initialized()
        _held.world = rendezvous.join(os.environ, partial(_next_store, rendezvous))
        _held.made_group = _held.world.backend is not None and (_held.made_group or not existed)
        _held.contract = _contract()
        _held.generation = Generation()
    return _held.world


def connected_world() -> World:
    """This process's world with its process group; all processes call it."""
    reconnect()
    return current_world()


def reconnect() -> None:
    """Make the process group anew where `end` has ended it; all processes call it."""
    if _held.is_ended and is_known() and current_world().size > 1 and not dist.is_initialized():
        _held.rendezvous.join(os.environ, partial(_next_store, _held.rendezvous))
        _held.made_group = True


def is_known() -> bool:
    """Whether this process has a world, also one whose training has ended; the call does not join one."""
    return _held.world is not None and not _is_stale()


def is_joined() -> bool:
    """Whether this process has a world whose training goes on; the call does not join one."""
    return is_known() and not _held.is_ended


def has_own_store() -> bool:
    """Whether the store of this process's group is that group's alone, since the group was made here."""
    return _held.made_group


def generation() -> Generation:
    """The mark of the world that this process has joined: what was made in another, also by another process, has another one."""
    return _held.generation


def at_world_exit(callback: Callable[[], None]) -> None:
    """Have something done while the process group is still there, when the world is left."""
    _held.exit_callbacks.append(callback)


def be_a_group(world: World) -> None:
    """Make a group of this process alone, for what needs one."""
    backend = "nccl" if world.device.type == "cuda" else "gloo"
    make_default_group(backend=backend, store=dist.HashStore(), rank=0, world_size=1)
    at_world_exit(dist.destroy_process_group)


def end() -> None:
    """End the process group that was made here; the world stays known until the next `Accelerator` joins a new one."""
    if _held.made_group and _held.pid == os.getpid() and dist.is_initialized():
        for callback in _held.exit_callbacks:
            callback()
        dist.destroy_process_group()
    _held.made_group = False
    _held.axis_groups = {}
    _held.is_ended = True


def forget() -> None:
    """Leave the world, so that the next call joins a new one; a process group that was made here ends."""
    end()
    _leave_behind()


def forget_ended() -> None:
    """Leave a world whose training has ended."""
    if _held.is_ended:
        forget()


def use_mesh(mesh: Mesh) -> World:
    """Have a training spread over the ranks as a mesh says, which has as many."""
    world = current_world()
    if mesh != world.training_mesh:
        _held.axis_groups = {}
        _held.world = world = replace(world, training_mesh=mesh)
    return world


def along(axis: Axis) -> World:
    """
    The world of the ranks that differ from this one along some axes of the mesh alone; `None` for all ranks.

    All processes call it, since the first call for an axis makes its process groups.
    """
    world = connected_world()
    if axis is None:
        return world
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    ranks = world.mesh.ranks_along(world.rank, *axes)
    if len(ranks) == world.size:
        return world
    groups = _held.axis_groups
    if len(ranks) > 1 and axes not in groups:
        if world.device.type == "xla":
            raise ConfigurationError(
                f"An operation along {' and '.join(axes)} was requested, but XLA devices exchange along all ranks alone. "
                "Leave the axis out."
            )
        slices = sorted({world.mesh.ranks_along(rank, *axes) for rank in range(world.size)})
        made = [dist.new_group(list(ranks)) for ranks in slices]
        groups[axes] = next(group for group, ranks in zip(made, slices, strict=True) if world.rank in ranks)
    group = groups[axes] if len(ranks) > 1 else None
    return replace(world, rank=ranks.index(world.rank), size=len(ranks), axis_group=group)


def rediscover() -> None:
    """Forget the world, but keep the process group: the next call finds this process in it."""
    _held.world = None


def connect_hosts(rank: int, size: int, timeout: timedelta) -> Any:
    """A group of gloo that connects the ranks beside their world, which need not be joined."""
    _claim()
    # torch's stubs don't know its arguments
    gloo: Any = dist.ProcessGroupGloo
    return gloo(_next_store(Rendezvous()), rank, size, timeout)


def _claim() -> None:
    """Drop what a forked process has inherited: it is its parent's."""
    if _held.pid != os.getpid():
        _held.store, _held.joins, _held.made_group = None, 0, False
    _held.pid = os.getpid()


def _is_stale() -> bool:
    """Whether the held world is of a former generation: inherited by a launched worker, or without its process group."""
    assert _held.world is not None
    if _held.pid != os.getpid():
        # A forked worker was given a rank of its own; a data loader's child was not, and shares its parent's world.
        return _held.contract != _contract()
    return _held.world.backend is not None and not _held.is_ended and not dist.is_initialized()


def _leave_behind() -> None:
    _held.world = None
    _held.is_ended = False
    _held.exit_callbacks = []
    _held.axis_groups = {}
    _held.shared = {}
    for attributes in _held.lasting.values():
        attributes.clear()


def _next_store(rendezvous: Rendezvous) -> dist.Store:
    """The store of this process's next group, which has a name of its own in one store that stays open."""
    # a second group that used the first one's name would read the addresses of connections that are closed
    if _held.store is None:
        # a store is hosted at the address that all know already, and there can't be another
        joined = dist.is_initialized()
        _held.store = dist.distributed_c10d._get_default_store() if joined else rendezvous.rendezvous()
    _held.joins += 1
    return dist.PrefixStore(f"accelerate_nb/{_held.joins}", _held.store)


def _contract() -> tuple[str | None, ...]:
    return tuple(os.environ.get(name) for name in _NAMES)


def collectives() -> dict[str, int]:
    """The number of collectives that each process group of this process has begun."""
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    counts: dict[str, int] = {}
    for group in list(dist.distributed_c10d._world.pg_map):
        counts[str(group.group_name)] = 0
        with suppress(RuntimeError):  # a kind of group that doesn't count
            counts[str(group.group_name)] = int(_backend_of(group)._get_sequence_number_for_group())
    return counts


def rebuild_groups(name: str) -> int:
    """
    End this process's groups and rebuild the default one; every rank calls it, with the same `name`, used once.

    Prepared models average their gradients over the new one. Returns how many groups beside the default one are gone.
    """
    others = max(len(dist.distributed_c10d._world.pg_map) - 1, 0) if dist.is_initialized() else 0
    group_options = _group_options()
    models = []
    for model in _averaging_models():
        # what torch keeps of such a model when it is pickled: all but its group and what averages over it
        state: dict[str, Any] = model.__getstate__()
        state.pop("_outlives_the_reducer", None)
        models.append((model, state))
    _release_models(model for model, _ in models)
    _end_default_group()
    # a connection of its own: a call that waited on the former one may have been cut off
    _held.store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    fresh = dist.PrefixStore(f"accelerate_nb/renewed/{name}", _held.store)
    make_default_group(store=fresh, **group_options)
    for model, state in models:
        _connect_ddp(model, state)
    return others


def end_groups() -> None:
    """End this process's groups, for good."""
    if dist.is_available() and dist.is_initialized():
        _release_models(_averaging_models())
        _end_default_group()


def _release_models(models: Iterable[DistributedDataParallel]) -> None:
    """The reducer goes before the group does (see `DDP._release`), and takes its hooks off the parameters."""
    for model in models:
        model.__dict__.update(reducer=None, logger=None, process_group=None)
        model.__dict__.pop("_outlives_the_reducer", None)


def _group_options() -> dict[str, Any]:
    """The arguments with which the default group was made, as far as it is there; else those for this process."""
    if not dist.is_initialized():
        return {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    rank_arguments = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    group = dist.group.WORLD
    assert group is not None
    others = {
        "timeout": getattr(_backend_of(group).options, "_timeout", None),
        "device_id": group.bound_device_id,
        "pg_options": _held.rendezvous.others.get("pg_options"),
    }
    given = {name: value for name, value in others.items() if value}
    return {"backend": str(dist.get_backend_config()), **rank_arguments, **given}


def _end_default_group() -> None:
    if not dist.is_initialized():
        # a group that could not be made is counted all the same, and a group's number is its name at the rendezvous
        dist.distributed_c10d._world.group_count = 0
        return
    if "nccl" in str(dist.get_backend_config()):
        # its orderly end waits for collectives that will never be
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


def _averaging_models() -> list[DistributedDataParallel]:
    # by the type: isinstance makes some objects look up, or even import, an attribute
    found = [item for item in gc.get_objects() if issubclass(type(item), DistributedDataParallel)]
    return [model for model in found if model.reducer is not None]


def _connect_ddp(model: DistributedDataParallel, kept: Mapping[str, Any]) -> None:
    """Have a model average over the new default group."""
    hooks = list(model.__dict__.get("_comm_hooks", ()))
    model.__setstate__(dict(kept))
    model.__dict__["_outlives_the_reducer"] = model.process_group
    for hook, state in hooks:
        if isinstance(getattr(state, "process_group", None), dist.ProcessGroup):
            state.process_group = model.process_group
        over = model.process_group if isinstance(state, dist.ProcessGroup) else state
        dist._register_comm_hook(model.reducer, over, hook)


def _backend_of(group: Any) -> Any:
    """The backend of a group, on whatever device it works."""
    return group._get_backend(next(iter(group._device_types), torch.device("cpu")))
