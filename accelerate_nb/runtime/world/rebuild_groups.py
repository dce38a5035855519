"""Rebuilds the process groups that a failure left broken, so that everything that was prepared goes on with them."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from accelerate_nb.runtime.world.registry import reconnect_hosts, use_store
from accelerate_nb.runtime.world.world import make_default_group


def collectives() -> dict[str, int]:
    """The number of collectives that each process group of this process has begun."""
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    return {str(group.group_name): _count(group) for group in list(dist.distributed_c10d._world.pg_map)}


@dataclass(frozen=True, slots=True)
class EndedGroups:
    """
    The remains of process groups that have ended: how the default one was made, and the models that averaged over it.

    `others` is the number of groups that were made beside the default one.
    """

    init_options: Mapping[str, Any]
    models: Sequence[tuple[DistributedDataParallel, Mapping[str, Any]]]
    others: int

    def join_groups(self, store: dist.Store) -> None:
        """Rebuild the default group, over a store that no rendezvous has used; models average over the new one."""
        make_default_group(store=store, **self.init_options)
        for model, state in self.models:
            _connect(model, state)


def rebuild_groups(name: str) -> int:
    """
    End this process's groups and rebuild the default one; every rank calls it, with the same `name`, used once.

    The world, the `Accelerator` and prepared models stay as they are: models that average their gradients do so over the
    new group. Groups that were made beside the default one are gone; returns how many.
    """
    parted = part()
    # a connection of its own: a call that waited on the former one may have been cut off
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    use_store(store)
    fresh = dist.PrefixStore(f"accelerate_nb/renewed/{name}", store)
    if not reconnect_hosts(fresh):
        parted.join_groups(fresh)
    return parted.others


def part() -> EndedGroups:
    """End this process's groups; what depended on them waits for new ones."""
    others = max(len(dist.distributed_c10d._world.pg_map) - 1, 0) if dist.is_initialized() else 0
    init_options = _init_options()
    models = [(model, _state(model)) for model in _averaging()]
    _release(model for model, _ in models)
    _end()
    return EndedGroups(init_options, models, others)


def end() -> None:
    """End this process's groups, for good."""
    if dist.is_available() and dist.is_initialized():
        _release(_averaging())
        _end()


def _release(models: Iterable[DistributedDataParallel]) -> None:
    """The reducer goes before the group does (see `DDP._release`), and takes its hooks off the parameters."""
    for model in models:
        model.__dict__.update(reducer=None, logger=None, process_group=None)
        model.__dict__.pop("_outlives_the_reducer", None)


def _init_options() -> dict[str, Any]:
    """The arguments with which the default group was made, as far as it is there; else those for this process."""
    rank_arguments = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    if not dist.is_initialized():
        return rank_arguments
    group = dist.group.WORLD
    assert group is not None
    others = {"timeout": getattr(_backend(group).options, "_timeout", None), "device_id": group.bound_device_id}
    given = {name: value for name, value in others.items() if value}
    return {"backend": str(dist.get_backend_config()), **rank_arguments, **given}


def _end() -> None:
    if not dist.is_initialized():
        # a group that could not be made is counted all the same, and a group's number is its name at the rendezvous
        dist.distributed_c10d._world.group_count = 0
        return
    if "nccl" in str(dist.get_backend_config()):
        # its orderly end waits for collectives that will never be
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


def _averaging() -> list[DistributedDataParallel]:
    # by the type: isinstance makes some objects look up, or even import, an attribute
    found = [item for item in gc.get_objects() if issubclass(type(item), DistributedDataParallel)]
    return [model for model in found if model.reducer is not None]


def _state(model: DistributedDataParallel) -> dict[str, Any]:
    """The state that torch keeps of such a model when it is pickled: all but its group and what averages over it."""
    state: dict[str, Any] = model.__getstate__()
    state.pop("_outlives_the_reducer", None)
    return state


def _connect(model: DistributedDataParallel, kept: Mapping[str, Any]) -> None:
    """Have a model average over the new default group."""
    hooks = list(model.__dict__.get("_comm_hooks", ()))
    model.__setstate__(dict(kept))
    model.__dict__["_outlives_the_reducer"] = model.process_group
    for hook, state in hooks:
        if isinstance(getattr(state, "process_group", None), dist.ProcessGroup):
            state.process_group = model.process_group
        over = model.process_group if isinstance(state, dist.ProcessGroup) else state
        dist._register_comm_hook(model.reducer, over, hook)


def _count(group: Any) -> int:
    try:
        return int(_backend(group)._get_sequence_number_for_group())
    except RuntimeError:
        # a kind of group that doesn't count
        return 0


def _backend(group: Any) -> Any:
    """The backend of a group, on whatever device it works."""
    return group._get_backend(next(iter(group._device_types), torch.device("cpu")))
