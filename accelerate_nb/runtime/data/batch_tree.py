"""The content of a batch: tensors, and columns of other things, nested in lists, tuples, mappings and data classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from accelerate_nb.errors import DataError
from accelerate_nb.runtime.operations.nested import honor_type, is_namedtuple, send_to_device


def is_column(data: Any) -> bool:
    """Whether it is a list or a tuple of one thing a sample: nothing in it is a tensor."""
    return isinstance(data, (list, tuple)) and not is_namedtuple(data) and not any(map(_holds_tensor, data))


def _holds_tensor(data: Any) -> bool:
    if isinstance(data, Tensor):
        return True
    if isinstance(data, (list, tuple)):
        return any(map(_holds_tensor, data))
    if isinstance(data, Mapping):
        return any(map(_holds_tensor, data.values()))
    return is_record(data) and any(_holds_tensor(item) for _, item in fields_of(data))


def mapped(function: Callable[[Any], Any], data: Any, is_column: Callable[[Any], bool] = is_column) -> Any:
    """
    The same nest with `function(leaf)` in place of every leaf.

    A leaf is a tensor, a column (a list or tuple without a tensor in it: one thing a sample), or anything that holds nothing.
    """
    if isinstance(data, Tensor) or is_column(data):
        return function(data)
    if isinstance(data, (list, tuple)):
        return honor_type(data, [mapped(function, item, is_column) for item in data])
    if isinstance(data, Mapping):
        return _like(data, {key: mapped(function, item, is_column) for key, item in data.items()})
    if is_record(data):
        return record_like(data, {name: mapped(function, item, is_column) for name, item in fields_of(data)})
    return function(data)


def leaves_of(data: Any, is_column: Callable[[Any], bool] = is_column) -> list[Any]:
    """All leaves, in the order in which they stand."""
    found: list[Any] = []
    mapped(found.append, data, is_column)
    return found


def with_leaves(data: Any, leaves: Iterator[Any], is_column: Callable[[Any], bool] = is_column) -> Any:
    """The same nest with other leaves, in the order of `leaves_of`."""
    return mapped(lambda _: next(leaves), data, is_column)


def is_record(data: Any) -> bool:
    """Whether it is an instance of a data class."""
    return is_dataclass(data) and not isinstance(data, type)


def fields_of(record: Any) -> list[tuple[str, Any]]:
    """The names and values of a data class's fields."""
    return [(field.name, getattr(record, field.name)) for field in fields(record)]


def record_like(record: Any, values: dict[str, Any]) -> Any:
    """A copy of a data class's instance with other values; its constructor, which may check them, isn't called."""
    twin = copy(record)
    for name, value in values.items():
        object.__setattr__(twin, name, value)  # also where it is frozen
    return twin


def _like(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(mapping) is dict:
        return items
    twin = copy(mapping)  # keeps what else it carries: a default factory, an encoding
    if hasattr(twin, "update"):
        twin.update(items)
        return twin
    return type(mapping)(items)  # type: ignore[call-arg]  # a mapping that can be made of another


def placed(batch: Any, device: Any, non_blocking: bool = False) -> Any:
    """The batch on the device: every tensor in it, and everything that has a `to`, also in data classes."""
    if hasattr(batch, "to"):
        return send_to_device(batch, device, non_blocking)
    if isinstance(batch, (list, tuple)):
        return honor_type(batch, [placed(item, device, non_blocking) for item in batch])
    if isinstance(batch, Mapping):
        return _like(batch, {key: placed(item, device, non_blocking) for key, item in batch.items()})
    if is_record(batch):
        return record_like(batch, {name: placed(item, device, non_blocking) for name, item in fields_of(batch)})
    return batch


def is_at_hand(batch: Any) -> bool:
    """Whether a batch is tensors in the host's memory, and no more: on a CPU there is nothing to move."""
    batch_type = type(batch)
    if batch_type is Tensor:
        return bool(batch.is_cpu)
    item = batch.values() if batch_type is dict else batch if batch_type in (list, tuple) else ()
    return bool(item) and all(type(entry) is Tensor and entry.is_cpu for entry in item)


def size_of(batch: Any) -> int:
    """The number of samples: the rows of the first tensor, or the things of the first column where there is none."""
    if isinstance(batch, (list, tuple)) and batch and isinstance(batch[0], Tensor) and batch[0].ndim > 0:
        return int(batch[0].shape[0])  # as most batches are
    leaves = leaves_of(batch)
    rows = [leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim > 0]
    columns = [len(leaf) for leaf in leaves if is_column(leaf)]
    for size in rows or columns:
        return int(size)
    raise DataError(
        f"A batch is to be cut into one part for each process, but a {type(batch).__name__} without tensors of at least one "
        "dimension, or lists, has no separate samples. Pass dispatch_batches=False."
    )


def cut(batch: Any, part: slice, size: int) -> Any:
    """
    The batch's samples in `part`, of `size` ones; what is not a row a sample stays as it is.

    A tensor of another length is an error: it could not be cut at the same indices.
    """

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if leaf.ndim > 0 and leaf.shape[0] != size:
                raise DataError(
                    f"A batch of {size} samples is to be cut into one part for each process, but holds a tensor of shape "
                    f"{tuple(leaf.shape)}. Give it one row a sample, pass slice_fn_for_dispatch, or pass dispatch_batches=False."
                )
            return leaf[part] if leaf.ndim > 0 else leaf
        return leaf[part] if is_column(leaf) and len(leaf) == size else leaf

    return mapped(of_leaf, batch)


def joined(batches: list[Any]) -> Any:
    """One batch of the samples of several; what is not a row a sample has to be the same in all of them."""
    if len(batches) == 1:
        return batches[0]
    rows = [leaves_of(batch) for batch in batches]
    if len({len(leaves) for leaves in rows}) != 1:
        raise DataError(
            f"Batches that hold {', '.join(str(len(leaves)) for leaves in rows)} things can't be joined. "
            "Make batches of one structure, or pass dispatch_batches=False."
        )
    return with_leaves(batches[0], (_joined_leaf(leaves) for leaves in zip(*rows, strict=True)))


def _joined_leaf(leaves: tuple[Any, ...]) -> Any:
    first = leaves[0]
    if isinstance(first, Tensor) and first.ndim > 0:
        return torch.cat(leaves)
    if is_column(first):
        return type(first)([item for leaf in leaves for item in leaf])
    if len(leaves) == 1 or all(_same(first, leaf) for leaf in leaves[1:]):
        return first
    raise DataError(
        f"Batches can't be joined: one holds a {type(first).__name__} that is not the same in all, and no row a sample. "
        "Leave it out of the batches, or pass dispatch_batches=False."
    )


def _same(item: Any, other: Any) -> bool:
    if isinstance(item, Tensor) and isinstance(other, Tensor):
        return torch.equal(item, other)
    return type(item) is type(other) and bool(item == other)
