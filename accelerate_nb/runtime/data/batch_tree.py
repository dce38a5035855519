"""The content of a batch: tensors, and columns of other things, nested in lists, tuples, mappings and data classes."""

from typing import Any

import torch
from torch import Tensor

from accelerate_nb.errors import DataError
from accelerate_nb.runtime.operations.nested import is_namedtuple, leaves_of, mapped, with_leaves


def is_column(data: Any) -> bool:
    """Whether it is a list or a tuple of one thing a sample: nothing in it is a tensor."""
    if not isinstance(data, (list, tuple)) or is_namedtuple(data):
        return False
    return not any(isinstance(leaf, Tensor) for leaf in leaves_of(data, records=True))


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
    leaves = leaves_of(batch, is_column, records=True)
    rows = [leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim > 0]
    columns = [len(leaf) for leaf in leaves if is_column(leaf)]
    for size in rows or columns:
        return int(size)
    raise DataError(
        f"A batch is to be cut into one part for each process, but a {type(batch).__name__} without tensors of at least one "
        "dimension, or lists, has no separate samples. Pass dispatch_batches=False."
    )


def cut(batch: Any, part: slice, size: int) -> Any:
    """The batch's samples in `part`, of `size` ones; what is not a row a sample stays as it is."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if leaf.ndim > 0 and leaf.shape[0] != size:
                raise DataError(
                    f"A batch of {size} samples is to be cut into one part for each process, but holds a tensor of shape "
                    f"{tuple(leaf.shape)}. Give it one row a sample, pass slice_fn_for_dispatch, or pass dispatch_batches=False."
                )
            return leaf[part] if leaf.ndim > 0 else leaf
        return leaf[part] if is_column(leaf) and len(leaf) == size else leaf

    return mapped(of_leaf, batch, is_column, records=True)


def joined(batches: list[Any]) -> Any:
    """One batch of the samples of several; what is not a row a sample has to be the same in all of them."""
    if len(batches) == 1:
        return batches[0]
    rows = [leaves_of(batch, is_column, records=True) for batch in batches]
    if len({len(leaves) for leaves in rows}) != 1:
        raise DataError(
            f"Batches that hold {', '.join(str(len(leaves)) for leaves in rows)} things can't be joined. "
            "Make batches of one structure, or pass dispatch_batches=False."
        )
    leaves = map(_joined_leaf, zip(*rows, strict=True))
    return with_leaves(batches[0], leaves, is_column, records=True)


def _joined_leaf(leaves: tuple[Any, ...]) -> Any:
    first = leaves[0]
    if isinstance(first, Tensor) and first.ndim > 0:
        return torch.cat(leaves)
    if is_column(first):
        return type(first)([item for leaf in leaves for item in leaf])
    if isinstance(first, Tensor):
        are_same = all(isinstance(leaf, Tensor) and torch.equal(first, leaf) for leaf in leaves[1:])
    else:
        are_same = all(type(leaf) is type(first) and bool(leaf == first) for leaf in leaves[1:])
    if are_same:
        return first
    raise DataError(
        f"Batches can't be joined: one holds a {type(first).__name__} that is not the same in all, and no row a sample. "
        "Leave it out of the batches, or pass dispatch_batches=False."
    )
