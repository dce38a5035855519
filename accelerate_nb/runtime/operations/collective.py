"""Operations in which every process takes part: what one has reaches the others."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from accelerate_nb.errors import ConfigurationError, OperationError
from accelerate_nb.runtime.current import current_world
from accelerate_nb.runtime.operations.exchange import Call, Frames, as_bytes, exchange, exchange_rows, places
from accelerate_nb.runtime.operations.nested import description, leaves_of, recursively_apply, with_leaves
from accelerate_nb.runtime.world import World

Reduction = Literal["sum", "mean", "max", "min", "none"]


def gather(tensor: Any) -> Any:
    """
    Every process's tensors, joined along dimension 0 in the order of ranks; a tensor without dimensions gets one.

    A nest of tensors of shape `(batch, ...)`, equal on all processes: `OperationError` on all of them if it isn't. In one
    process the nest itself.
    """
    world = current_world()
    if world.size == 1:
        return tensor
    leaves = _tensors(world, "gather", tensor)
    frames = exchange(world, Call("gather", description(tensor)), [as_bytes(leaf) for leaf in leaves])
    joined = _joined_from(frames, leaves) if frames.complete else [_gather_one(world, leaf) for leaf in leaves]
    return with_leaves(tensor, iter(joined))


def _joined_from(frames: Frames, leaves: list[Tensor]) -> list[Tensor]:
    joined = []
    for rows, leaf in zip(_rows(frames, leaves), leaves, strict=True):
        length, *rest = leaf.shape or (1,)
        joined.append(rows.reshape(frames.world.size * length, *rest))
    return joined


def _rows(frames: Frames, leaves: list[Tensor]) -> list[Tensor]:
    """What every process sent in place of each leaf: `(processes, *shape)`."""
    rows = []
    start = 0
    for leaf in leaves:
        length = leaf.numel() * leaf.element_size()
        part = frames.room[:, start : start + length].contiguous()
        rows.append(part.view(leaf.dtype).view(frames.world.size, *leaf.shape))
        start += places([part[0]])[1]
    return rows


def _gather_one(world: World, leaf: Tensor) -> Tensor:
    length, *rest = leaf.shape or (1,)
    joined = torch.empty((world.size, *leaf.shape), dtype=leaf.dtype, device=world.device)
    rows = as_bytes(joined).view(world.size, -1)
    dist.all_gather(list(rows.unbind()), as_bytes(leaf))
    return joined.view(world.size * length, *rest)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:  # noqa: ARG001 - see below
    """
    The sum, mean, largest or smallest of every process's tensors, as new tensors; "none" only copies.

    A nest of tensors, equal in shapes and types on all processes. `scale` is Hugging Face's and, as there, for XLA only.
    """
    if reduction not in get_args(Reduction):
        known = ", ".join(get_args(Reduction))
        raise ConfigurationError(f"reduction={reduction!r} was asked for. Known ones are {known}.")
    world = current_world()
    if world.size == 1 or reduction == "none":
        return recursively_apply(torch.clone, tensor, error_on_other_type=True)
    operation = f"reduce {reduction}"
    leaves = _tensors(world, operation, tensor)
    frames = exchange(world, Call(operation, description(tensor)), [as_bytes(leaf) for leaf in leaves])
    if frames.complete:
        reduced = [_LOCAL[reduction](rows) for rows in _rows(frames, leaves)]
    else:
        reduced = [_reduce_one(leaf, reduction) for leaf in leaves]
    if reduction == "mean":
        reduced = [each / world.size for each in reduced]
    return with_leaves(tensor, map(_with_gradient, leaves, reduced))


_LOCAL: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda rows: rows.sum(0, dtype=rows.dtype),
    "mean": lambda rows: rows.sum(0, dtype=rows.dtype),
    "max": lambda rows: rows.amax(0),
    "min": lambda rows: rows.amin(0),
}


def _reduce_one(leaf: Tensor, reduction: str) -> Tensor:
    operations = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
    reduced = leaf.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(reduced, operations.get(reduction, dist.ReduceOp.SUM))
    return reduced


def _with_gradient(leaf: Tensor, reduced: Tensor) -> Tensor:
    """The reduced value, through which a backward reaches this process's own part."""
    if not leaf.requires_grad:
        return reduced
    through = leaf.clone()
    through.detach().copy_(reduced)
    return through


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """
    The tensors of one process, on all of them, as new tensors.

    A nest of tensors, equal in shapes and types on all processes. In one process the nest itself.
    """
    world = current_world()
    if world.size == 1:
        return tensor
    operation = f"broadcast from process {_process(world, from_process)}"
    leaves = _tensors(world, operation, tensor)
    frames = exchange(world, Call(operation, description(tensor)), [as_bytes(leaf) for leaf in leaves])
    if frames.complete:
        sent = [rows[from_process].clone() for rows in _rows(frames, leaves)]
    else:
        sent = [_broadcast_one(leaf, from_process) for leaf in leaves]
    return with_leaves(tensor, iter(sent))


def _broadcast_one(leaf: Tensor, from_process: int) -> Tensor:
    copy = leaf.detach().clone(memory_format=torch.contiguous_format)
    dist.broadcast(as_bytes(copy), src=from_process)
    return copy


def gather_object(object: Any) -> Any:
    """
    Every process's picklable object, in one list in the order of ranks.

    Lists and tuples are joined to one list of their elements; anything else is one element a process. In one process the
    object itself.
    """
    world = current_world()
    if world.size == 1:
        return object
    gathered = _everyones(world, "gather_object", object)
    return [each for one in gathered for each in (one if isinstance(one, (list, tuple)) else [one])]


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """The list, its elements replaced by those of one process; any picklable objects, equally many on all processes."""
    world = current_world()
    if world.size == 1:
        return object_list
    operation = f"broadcast_object_list of {len(object_list)} from process {_process(world, from_process)}"
    mine = object_list if world.rank == from_process else None
    object_list[:] = _everyones(world, operation, mine)[from_process]
    return object_list


def copy_tensor_to_devices(tensor: Tensor | None = None) -> Tensor:
    """The tensor that one process has, on all of them; the others pass `None`."""
    world = current_world()
    told = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
    everyones = [told] if world.size == 1 else _everyones(world, "copy_tensor_to_devices", told)
    having = [rank for rank, each in enumerate(everyones) if each is not None]
    if len(having) != 1:
        raise OperationError(
            f"copy_tensor_to_devices was given a tensor by {len(having)} processes ({having}). Exactly one passes a tensor."
        )
    if world.size == 1:
        assert tensor is not None
        return tensor.clone()
    shape, dtype = everyones[having[0]]  # type: ignore[misc]  # the one that is not None
    copy = torch.empty(shape, dtype=dtype, device=world.device) if tensor is None else tensor.to(world.device)
    return _broadcast_one(copy, having[0])


def _everyones(world: World, operation: str, mine: Any) -> list[Any]:
    call = Call(operation, "objects")
    try:
        pickled = pickle.dumps(mine)
    except Exception:
        # the others are about to wait for this process: they hear that nothing will come
        with suppress(OperationError):
            exchange(world, Call(operation, f"a {type(mine).__name__} that can't be pickled"))
        raise
    row = torch.frombuffer(bytearray(pickled), dtype=torch.uint8)
    rows = exchange_rows(world, call, row)
    return [mine if rank == world.rank else _unpickled(row) for rank, row in enumerate(rows)]


def _unpickled(row: Tensor) -> Any:
    array: np.ndarray[Any, Any] = row.cpu().numpy()
    return pickle.loads(array.tobytes())


def _tensors(world: World, operation: str, data: Any) -> list[Tensor]:
    """The nest's tensors on this process's device; anything else in it is an error on every process."""
    leaves = leaves_of(data)
    if any(not isinstance(leaf, Tensor) for leaf in leaves):
        exchange(
            world, Call(operation, description(data))
        )  # the others are told, and if they have the same, say the same
        recursively_apply(lambda leaf: leaf, data, error_on_other_type=True)
    return [leaf.to(world.device) for leaf in leaves]


def _process(world: World, rank: int) -> int:
    if not 0 <= rank < world.size:
        raise ConfigurationError(
            f"from_process={rank} was asked for, and there are {world.size} processes. Choose from 0 to {world.size - 1}."
        )
    return rank
