"""Tensors nested in lists, tuples, mappings and data classes, handled as one: the only page that walks through nested data."""

import pickle
from collections import UserDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import partial, update_wrapper
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor

from accelerate_nb.errors import DataError

# What `accelerate.utils.operations` offers.
__all__ = [
    "ConvertOutputsToFp32", "TensorInformation", "concatenate", "convert_outputs_to_fp32", "convert_to_fp32",
    "find_batch_size", "find_device", "get_data_structure", "get_shape", "honor_type", "ignorant_find_batch_size",
    "initialize_tensors", "is_namedtuple", "is_tensor_information", "is_torch_tensor", "is_torch_xpu_tensor",
    "listify", "recursively_apply", "send_to_device", "slice_tensors",
]  # fmt: skip

T = TypeVar("T")

_SHORT = (torch.float16, torch.bfloat16)
_DESCRIBES_ITSELF = (str, int, float, bool, bytes, Enum, type(None))


@dataclass
class TensorInformation:
    """A tensor's shape and type, without its numbers."""

    shape: torch.Size
    dtype: torch.dtype


def is_torch_tensor(tensor: Any) -> TypeGuard[Tensor]:
    """Whether it is a tensor."""
    return isinstance(tensor, Tensor)


def is_torch_xpu_tensor(tensor: Any) -> bool:
    """Whether it is a tensor on an Intel GPU."""
    return isinstance(tensor, Tensor) and tensor.device.type == "xpu"


def is_tensor_information(tensor_info: Any) -> TypeGuard[TensorInformation]:
    """Whether it describes a tensor."""
    return isinstance(tensor_info, TensorInformation)


def is_namedtuple(data: Any) -> bool:
    """Whether it is a named tuple, or has all attributes of one."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def is_record(data: Any) -> bool:
    """Whether it is an instance of a data class."""
    return is_dataclass(data) and not isinstance(data, type)


def honor_type(obj: T, generator: Iterable[Any]) -> T:
    """The elements as a container of `obj`'s own type: a list, a tuple or a named tuple."""
    if is_namedtuple(obj):
        return type(obj)(*generator)
    return type(obj)(generator)  # type: ignore[call-arg]  # what holds elements is made of elements


def _like(container: Any, items: dict[Any, Any]) -> Any:
    """The items as a mapping of the given one's type, or as a data class's instance, with all else that the given one holds."""
    if type(container) is dict:
        return items
    if isinstance(container, (dict, UserDict)):
        twin = copy(container)  # with its default factory, its encodings
        for key, item in items.items():
            twin[key] = item
        return twin
    if isinstance(container, Mapping):
        return type(container)(items)  # type: ignore[call-arg]  # a mapping that can be made of another
    twin = copy(container)  # the constructor of a data class may check its arguments
    for name, value in items.items():
        object.__setattr__(twin, name, value)  # also where it is frozen
    return twin


def _items(data: Any, records: bool) -> Iterable[tuple[Any, Any]] | None:
    """What a container holds, under its indices, keys or names; `None` for anything else."""
    if isinstance(data, (list, tuple)):
        return enumerate(data)
    if isinstance(data, Mapping):
        return data.items()
    if not records or not is_record(data):
        return None
    # a field that the constructor leaves out may not be set
    return [(field.name, getattr(data, field.name)) for field in fields(data) if hasattr(data, field.name)]


def mapped(
    function: Callable[[Any], Any],
    data: Any,
    is_leaf: Callable[[Any], bool] | None = None,
    records: bool = False,
    skip_keys: Container[Any] = (),
) -> Any:
    """The same nest with `function(leaf)` in place of every leaf, of lists, tuples, mappings and, with `records`, data classes."""
    if is_leaf is not None and is_leaf(data):
        return function(data)
    if isinstance(data, (list, tuple)):
        return honor_type(data, [mapped(function, item, is_leaf, records, skip_keys) for item in data])
    items = _items(data, records)
    if items is None:
        return function(data)
    return _like(
        data,
        {key: item if key in skip_keys else mapped(function, item, is_leaf, records, skip_keys) for key, item in items},
    )


def leaves_of(data: Any, is_leaf: Callable[[Any], bool] | None = None, records: bool = False) -> list[Any]:
    """All leaves of a nest, whatever they are, in the order of `mapped`."""
    items = None if is_leaf is not None and is_leaf(data) else _items(data, records)
    if items is None:
        return [data]
    return [leaf for _, item in items for leaf in leaves_of(item, is_leaf, records)]


def with_leaves(
    data: Any, leaves: Iterator[Any], is_leaf: Callable[[Any], bool] | None = None, records: bool = False
) -> Any:
    """The same nest with other leaves, in the order of `leaves_of`."""
    return mapped(lambda _: next(leaves), data, is_leaf, records)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """
    The same nest, with `func(leaf, *args, **kwargs)` in place of every leaf that passes `test_type`.

    Other leaves stay as they are; with `error_on_other_type` they raise a `DataError`, which is a `TypeError`.

    >>> recursively_apply(lambda tensor: tensor.sum().item(), {"a": [torch.ones(2), "text"]})
    {'a': [2.0, 'text']}
    """

    def apply(leaf: Any) -> Any:
        if test_type(leaf):
            return func(leaf, *args, **kwargs)
        if error_on_other_type:
            wanted = getattr(test_type, "__name__", str(test_type))
            raise DataError(
                f"{getattr(func, '__name__', str(func))} was given {_first_other(data, test_type)}, and works on lists, tuples and "
                f"mappings of what passes {wanted}. Take it out, or convert it first."
            )
        return leaf

    return mapped(apply, data)


def tensors_of(operation: str, data: Any) -> list[Tensor]:
    """All leaves of a nest of tensors; a `DataError` names the operation, and the first position where something else is."""
    leaves = leaves_of(data)
    if not all(map(is_torch_tensor, leaves)):
        others = {"gather": "gather_object", "broadcast": "broadcast_object_list"}.get(operation)
        way = f", or send it by {others}" if others else ", or leave it out"
        raise DataError(
            f"{operation} was given {_first_other(data, is_torch_tensor)}, and takes tensors, also in lists, tuples and mappings. Make "
            f"it a tensor (torch.tensor){way}."
        )
    return leaves


def _first_other(data: Any, test_type: Callable[[Any], bool]) -> str:
    """The first leaf of a nest that fails a test, and its position."""
    position, leaf = next((position, leaf) for position, leaf in _positions(data, "") if not test_type(leaf))
    value = f" ({leaf!r})" if isinstance(leaf, (int, float, complex)) else ""
    name = type(leaf).__name__
    article = "an" if name[0] in "aeiou" else "a"
    return f"{article} {name}{value}{f' at {position}' if position else ''}"


def _positions(data: Any, position: str) -> Iterator[tuple[str, Any]]:
    """All leaves of a nest with their positions, as `['boxes'][1]`."""
    items = _items(data, records=False)
    if items is None:
        yield position, data
    for key, item in items or ():
        yield from _positions(item, f"{position}[{key!r}]")


def description(data: Any, of_tensor: Callable[[Tensor], str] | None = None) -> str:
    """A nest in words that are equal on two processes if both can take part in the same operation."""
    if isinstance(data, Tensor):
        return f"{str(data.dtype)[6:]}{list(data.shape)}" if of_tensor is None else of_tensor(data)
    if isinstance(data, (list, tuple)):
        inner = ", ".join([description(item, of_tensor) for item in data])
        return f"[{inner}]" if isinstance(data, list) else f"({inner})"
    if isinstance(data, Mapping):
        return f"{{{', '.join([f'{_key(key)}: {description(item, of_tensor)}' for key, item in data.items()])}}}"
    return type(data).__name__


def _key(key: Any) -> str:
    # the text of an object without a text of its own holds its address, which differs on every process
    return repr(key) if isinstance(key, _DESCRIBES_ITSELF) else type(key).__name__


def send_to_device(
    tensor: Any, device: Any, non_blocking: bool = False, skip_keys: str | list[str] | None = None
) -> Any:
    """
    The nest with everything that has a `to` on the device; mappings leave the values of `skip_keys` where they are.

    With `non_blocking` a copy from pinned memory runs while the process goes on.
    """
    skipped = [skip_keys] if isinstance(skip_keys, str) else skip_keys or ()
    return mapped(partial(_moved, device, non_blocking), tensor, _can_move, skip_keys=skipped)


def placed(batch: Any, device: Any, non_blocking: bool = False) -> Any:
    """The same as `send_to_device`, also of what data classes hold."""
    return mapped(partial(_moved, device, non_blocking), batch, _can_move, records=True)


def _can_move(item: Any) -> bool:
    return hasattr(item, "to")


def _moved(device: Any, non_blocking: bool, item: Any) -> Any:
    if not hasattr(item, "to"):
        return item
    try:
        return item.to(device, non_blocking=non_blocking)
    except TypeError:  # a `to` of one's own may know nothing of non_blocking
        return item.to(device)


def get_data_structure(data: Any) -> Any:
    """The nest with a `TensorInformation` in place of every tensor."""
    return recursively_apply(lambda tensor: TensorInformation(tensor.shape, tensor.dtype), data)


def get_shape(data: Any) -> Any:
    """The nest with a list of its dimensions in place of every tensor."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """The nest with an uninitialised tensor in place of every `TensorInformation`."""
    return recursively_apply(
        lambda information: torch.empty(information.shape, dtype=information.dtype),
        data_structure,
        test_type=is_tensor_information,
    )


def find_batch_size(data: Any) -> int:
    """The length of the nest's first tensor in dimension 0; `DataError` where there is none."""
    first = data
    while (items := _items(first, records=False)) is not None:
        entry = next(iter(items), None)
        if entry is None:
            raise DataError(
                f"A batch size was looked for in an empty {type(first).__name__}. Pass a nest with tensors."
            )
        first = entry[1]
    if not isinstance(first, Tensor):
        raise DataError(f"A batch size was looked for in a {type(first).__name__}. Only tensors have one.")
    if first.ndim == 0:
        raise DataError("A batch size was looked for in a tensor without dimensions. Give it one: `tensor[None]`.")
    return int(first.shape[0])


def ignorant_find_batch_size(data: Any) -> int | None:
    """The same as `find_batch_size`, but `None` where there is none."""
    try:
        return find_batch_size(data)
    except DataError:
        return None


def find_device(data: Any) -> torch.device | None:
    """The device of the first tensor in the nest."""
    return next((leaf.device for leaf in leaves_of(data) if isinstance(leaf, Tensor)), None)


def listify(data: Any) -> Any:
    """The nest with lists of plain numbers in place of tensors."""
    return recursively_apply(lambda tensor: tensor.detach().cpu().tolist(), data)


def slice_tensors(
    data: Any,
    tensor_slice: Any,
    process_index: int | None = None,  # noqa: ARG001 - a replacement of this function may need it
    num_processes: int | None = None,  # noqa: ARG001 - the same
) -> Any:
    """The nest with `tensor[tensor_slice]` in place of every tensor."""
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def concatenate(data: Any, dim: int = 0) -> Any:
    """One nest of the tensors of several equal nests, joined along `dim`; one nest of anything else comes back as it is."""
    first = data[0]
    if isinstance(first, Tensor):
        return torch.cat(tuple(data), dim=dim)
    if isinstance(first, (list, tuple)):
        return honor_type(first, (concatenate([item[index] for item in data], dim) for index in range(len(first))))
    if isinstance(first, Mapping):
        return _like(first, {key: concatenate([item[key] for item in data], dim) for key in first})
    if len(data) == 1:
        return first
    raise DataError(f"Only tensors can be joined, and there is a {type(first).__name__}. Leave it out of the batches.")


def convert_to_fp32(tensor: Any) -> Any:
    """The nest with float32 in place of everything in float16 and bfloat16."""
    return recursively_apply(
        lambda short: short.float(), tensor, test_type=lambda leaf: getattr(leaf, "dtype", None) in _SHORT
    )


class ConvertOutputsToFp32:
    """A function that returns float32 where the one inside returns float16 or bfloat16."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> Any:
        raise pickle.PicklingError(
            "A model prepared for mixed precision can't be pickled. "
            "Take it out first: `accelerator.unwrap_model(model, keep_fp32_wrapper=False)`."
        )


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator: the function's outputs are float32; the function itself stays reachable as `__wrapped__`."""
    converting = ConvertOutputsToFp32(model_forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return converting(*args, **kwargs)

    forward.__wrapped__ = converting  # type: ignore[attr-defined]  # where `inspect` and unwrapping find it
    return forward
