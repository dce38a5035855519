"""Operations in which every process takes part: what one has reaches the others."""

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from types import MappingProxyType
from typing import Any, Literal, ParamSpec, TypeVar, get_args

import torch
from torch import Tensor

from accelerate_nb.errors import ConfigurationError, DataError, OperationError
from accelerate_nb.runtime.operations.nested import description, tensors_of, with_leaves
from accelerate_nb.runtime.operations.transfer import CollectiveCall, TensorMover, agree, as_bytes, exchange_rows
from accelerate_nb.runtime.world.registry import along, connected_world
from accelerate_nb.runtime.world.state import AcceleratorState, PartialState
from accelerate_nb.runtime.world.world import Axis, World
from accelerate_nb.runtime.xla.collectives import mover_through
from accelerate_nb.user_warnings import warn_user

# What `accelerate.utils.operations` offers.
__all__ = [
    "TENSOR_INT_TO_DTYPE", "TENSOR_TYPE_TO_INT", "CannotPadNestedTensorWarning", "GatheredParameters", "broadcast",
    "broadcast_object_list", "chained_operation", "copy_tensor_to_devices", "gather", "gather_object",
    "gather_tensor_shape", "pad_across_processes", "pad_input_tensors", "reduce", "verify_operation",
]  # fmt: skip

Reduction = Literal["sum", "mean", "max", "min", "none"]
P = ParamSpec("P")
R = TypeVar("R")


class CannotPadNestedTensorWarning(UserWarning):
    """A nested tensor has many lengths in one dimension, and was left as it is."""


def gather(tensor: Any, *, axis: Axis = None) -> Any:
    """
    Every process's tensors, joined along dimension 0 in the order of ranks; a tensor without dimensions gets one.

    A nest of tensors of shape `(batch, ...)`, equal on all processes: `OperationError` on all of them if it isn't. In one
    process the nest itself. With an `axis` of the mesh, or several, the processes are those along it.
    """
    world = along(axis)
    if world.size == 1:
        return tensor
    leaves = _tensors(world, "gather", tensor)
    call = CollectiveCall("gather", description(tensor))
    return with_leaves(tensor, iter(_mover(world).gather(call, leaves)))


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0, *, axis: Axis = None) -> Any:
    """
    The sum, mean, largest or smallest of every process's tensors, as new tensors; "none" only copies.

    A nest of tensors, equal in shapes and types on all processes. A backward goes on into this process's own part; whole
    numbers have a mean in float32. `scale` is Hugging Face's and, as there, for XLA only. `axis` is as in `gather`.
    """
    if reduction not in get_args(Reduction):
        known = ", ".join(get_args(Reduction))
        raise ConfigurationError(f"reduction={reduction!r} was requested. Known ones are {known}.")
    world = along(axis)
    if world.size == 1 or reduction == "none":
        return with_leaves(tensor, map(torch.clone, tensors_of("reduce", tensor)))
    operation = f"reduce {reduction}"
    leaves = _tensors(world, operation, tensor)
    call = CollectiveCall(operation, description(tensor))
    reduced = _mover(world).reduce(call, leaves, reduction, scale)
    reduced = [_with_gradient(leaf, item) for leaf, item in zip(leaves, reduced, strict=True)]
    if reduction == "mean":
        reduced = [_divided(item, world.size) for item in reduced]
    return with_leaves(tensor, iter(reduced))


def _divided(total: Tensor, by: int) -> Tensor:
    if total.is_floating_point() and not total.requires_grad:
        return total.div_(by)
    if not total.is_complex():
        return total / by
    # torch_xla loses the imaginary part of a complex tensor that is divided by a number
    return torch.view_as_complex(torch.view_as_real(total) / by)


def _with_gradient(leaf: Tensor, reduced: Tensor) -> Tensor:
    """The reduced value, through which a backward reaches this process's own part."""
    if not leaf.requires_grad:
        return reduced
    through = leaf.clone()
    through.detach().copy_(reduced)
    return through


def broadcast(tensor: Any, from_process: int = 0, *, axis: Axis = None) -> Any:
    """
    The tensors of one process, on all of them, as new tensors.

    A nest of tensors, equal in shapes and types on all processes. In one process the nest itself. `axis` is as in `gather`, and
    `from_process` is then the index along it.
    """
    world = along(axis)
    if world.size == 1:
        return tensor
    operation = f"broadcast from process {_process(world, from_process)}"
    leaves = _tensors(world, operation, tensor)
    call = CollectiveCall(operation, description(tensor))
    return with_leaves(tensor, iter(_mover(world).broadcast(call, leaves, from_process)))


def gather_object(object: Any, *, axis: Axis = None) -> Any:
    """
    Every process's picklable object, in one list in the order of ranks.

    Lists and tuples are joined to one list of their elements; anything else is one element a process. In one process the
    object itself.
    """
    world = along(axis)
    if world.size == 1:
        return object
    gathered = _gather_values(world, "gather_object", object)
    return [entry for item in gathered for entry in (item if isinstance(item, (list, tuple)) else [item])]


def broadcast_object_list(object_list: list[Any], from_process: int = 0, *, axis: Axis = None) -> list[Any]:
    """The list, its elements replaced by those of one process; any picklable objects, equally many on all processes."""
    world = along(axis)
    if world.size == 1:
        return object_list
    if not isinstance(object_list, list):
        raise DataError(
            f"broadcast_object_list was given a {type(object_list).__name__}, and replaces the elements of a list. Put it in one."
        )
    operation = f"broadcast_object_list of {len(object_list)} from process {_process(world, from_process)}"
    value = object_list if world.rank == from_process else None
    object_list[:] = _gather_values(world, operation, value)[from_process]
    return object_list


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float | Tensor = 0, pad_first: bool = False) -> Any:
    """
    The nest of tensors, each padded along `dim` with `pad_index` to the longest of all processes, at its end or beginning.

    The same nest on all processes, with any shapes of equally many dimensions; tensors with too few of them stay as they are.
    """
    leaves = tensors_of("pad_across_processes", tensor)
    if any(leaf.is_nested for leaf in leaves):
        warn_user(
            "A nested tensor can't be padded: it has many lengths. It is left as it is; use `to_padded_tensor` first.",
            CannotPadNestedTensorWarning,
        )
    world = connected_world()
    if world.size == 1:
        return tensor
    lengths = [None if leaf.is_nested or not -leaf.ndim <= dim < leaf.ndim else leaf.shape[dim] for leaf in leaves]
    described = description(
        tensor, lambda leaf: "nested tensor" if leaf.is_nested else f"tensor of {leaf.ndim} dimensions"
    )
    row = as_bytes(torch.tensor([length or 0 for length in lengths], dtype=torch.int64))
    rows = exchange_rows(world, CollectiveCall("pad_across_processes", f"dim={dim}, {described}"), row)
    all_lengths = torch.stack([row.view(torch.int64) for row in rows])
    longest: list[int] = all_lengths.amax(0).tolist()
    is_even = bool((all_lengths == all_lengths[0]).all())
    if not is_even:
        # each process is about to give its device other work, which is to be no part of what they compute together
        world.settle()
    padded = [
        leaf if length in (None, wanted) else _padded(leaf, dim % leaf.ndim, wanted, pad_index, at_front=pad_first)
        for leaf, length, wanted in zip(leaves, lengths, longest, strict=True)
    ]
    if not is_even:
        world.settle()
    return with_leaves(tensor, iter(padded))


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """The nest of tensors of `batch_size` rows, with zeros after the end of `dim` up to the next multiple of `num_processes`."""
    wanted = -(-batch_size // num_processes) * num_processes
    leaves = tensors_of("pad_input_tensors", tensor)
    return with_leaves(tensor, (_padded(leaf, dim, wanted, 0, at_front=False) for leaf in leaves))


def is_anywhere(value: bool) -> bool:
    """Whether something is true on some process; all of them call it."""
    world = connected_world()
    return value if world.size == 1 else any(_gather_values(world, "is_anywhere", value))


def copy_tensor_to_devices(tensor: Tensor | None = None) -> Tensor:
    """The tensor that one process has, on all of them; the others pass `None`."""
    world = connected_world()
    holder, shape, dtype = _single_holder(world, "copy_tensor_to_devices", tensor)
    if world.size == 1:
        assert tensor is not None
        return tensor.clone()
    return _mover(world).send(tensor, holder, shape, dtype)


# Accelerate's numbers for the types of tensors.
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
TENSOR_TYPE_TO_INT = MappingProxyType({dtype: number for number, dtype in enumerate((*_FLOATS, *_INTEGERS), start=1)})
TENSOR_INT_TO_DTYPE = MappingProxyType({number: dtype for dtype, number in TENSOR_TYPE_TO_INT.items()})


def gather_tensor_shape(tensor: Tensor | None) -> tuple[Tensor, int]:
    """
    The shape of the tensor that one process has, as a tensor of one number a dimension, with the number of its type.

    The others pass `None`. `TENSOR_INT_TO_DTYPE` has the types by their numbers; one that has none is an `OperationError`.
    """
    world = connected_world()
    _, shape, dtype = _single_holder(world, "gather_tensor_shape", tensor)
    if dtype not in TENSOR_TYPE_TO_INT:
        raise OperationError(
            f"gather_tensor_shape was given a tensor of {dtype}, which has no number. Use copy_tensor_to_devices, which "
            "sends tensors of all types."
        )
    return torch.tensor(shape, dtype=torch.int, device=world.device), TENSOR_TYPE_TO_INT[dtype]


def verify_operation(function: Callable[P, R]) -> Callable[P, R]:
    """
    A decorator: with `PartialState().debug` an `OperationError` on all processes if their tensors differ in shape or type.

    The tensors are the argument `tensor`, or the first one. The operations of this package are always checked.

    >>> @verify_operation
    ... def total(tensor): return tensor.sum()
    """

    @wraps(function)
    def verified(*args: P.args, **kwargs: P.kwargs) -> R:
        state = PartialState()
        if state.debug and state.use_distributed:
            tensor = kwargs["tensor"] if "tensor" in kwargs else args[0]
            agree(state.world, CollectiveCall(_name(function), description(tensor)))
        return function(*args, **kwargs)

    return verified


def chained_operation(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: an `OperationError` inside names this function too."""

    @wraps(function)
    def chained(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except OperationError as error:
            raise OperationError(f"{_name(function)} could not be done: {error}") from error

    return chained


@contextmanager
def GatheredParameters(  # noqa: N802 - DeepSpeed's name
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Iterator[None]:
    """
    A block in which parameters are whole on every process; without DeepSpeed's ZeRO-3, which parts them, they always are.

    All processes enter it. What the process `modifier_rank` changes in them is on all processes after it.

    >>> with GatheredParameters(model.parameters()): model.initialize()  # doctest: +SKIP
    """
    strategy: Any = AcceleratorState().strategy
    if not enabled or strategy is None:
        yield
        return
    with strategy.gathered(params, modifier_rank, fwd_module):
        yield


def _single_holder(world: World, operation: str, tensor: Tensor | None) -> tuple[int, tuple[int, ...], torch.dtype]:
    """The process that has a tensor, with the tensor's shape and type."""
    description = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
    descriptions = [description] if world.size == 1 else _gather_values(world, operation, description)
    holders = {rank: held for rank, held in enumerate(descriptions) if held is not None}
    if len(holders) != 1:
        raise OperationError(
            f"{operation} was given a tensor by {len(holders)} processes ({list(holders)}). Exactly one passes a tensor."
        )
    ((rank, (shape, dtype)),) = holders.items()
    return rank, shape, dtype


def _gather_values(world: World, operation: str, value: Any) -> list[Any]:
    call = CollectiveCall(operation, "objects")
    try:
        pickled = _mover(world).packed(value)
    except Exception:
        # the others are about to wait for this process: they receive that nothing will come
        with suppress(OperationError):
            agree(world, CollectiveCall(operation, f"a {type(value).__name__} that can't be pickled"))
        raise
    row = torch.frombuffer(bytearray(pickled), dtype=torch.uint8)
    rows = exchange_rows(world, call, row)
    return [value if rank == world.rank else pickle.loads(row.numpy().data) for rank, row in enumerate(rows)]


def _mover(world: World) -> TensorMover:
    """The mover that suits the devices of these processes."""
    return mover_through(world) if world.device.type == "xla" else TensorMover(world)


def _tensors(world: World, operation: str, data: Any) -> list[Tensor]:
    """The nest's tensors on this process's device, those in parts (DTensors) whole; anything else in it is an error on every process."""
    try:
        leaves = tensors_of(operation.partition(" ")[0], data)
    except DataError:
        agree(world, CollectiveCall(operation, description(data)))  # if the others have the same, they say the same
        raise
    # by the name of the method, since it takes half a second to load the class
    return [(leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf).to(world.device) for leaf in leaves]


def _process(world: World, rank: int) -> int:
    if not 0 <= rank < world.size:
        raise ConfigurationError(
            f"from_process={rank} was requested, and there are {world.size} processes. Choose from 0 to {world.size - 1}."
        )
    return rank


def _padded(leaf: Tensor, dim: int, wanted: int, value: float | Tensor, *, at_front: bool) -> Tensor:
    shape = list(leaf.shape)
    shape[dim] = wanted
    padded, length = leaf.new_empty(shape), leaf.shape[dim]
    if isinstance(value, Tensor):
        padded.copy_(value)
    else:
        padded.narrow(dim, 0 if at_front else length, wanted - length).fill_(value)
    padded.narrow(dim, wanted - length if at_front else 0, length).copy_(leaf)
    return padded


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
