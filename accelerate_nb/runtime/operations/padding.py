"""Padding of tensors to equal lengths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accelerate_nb.runtime.operations.byte_rows import as_bytes
from accelerate_nb.runtime.operations.call_check import CollectiveCall, exchange_rows
from accelerate_nb.runtime.operations.nested import description, tensors_of, with_leaves
from accelerate_nb.runtime.world.registry import current_world
from accelerate_nb.runtime.world.world import World
from accelerate_nb.user_warnings import warn_user


class CannotPadNestedTensorWarning(UserWarning):
    """A nested tensor has many lengths in one dimension, and was left as it is."""


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
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
    lengths = [_length(leaf, dim) for leaf in leaves]
    world = current_world()
    if world.size == 1:
        return tensor
    all_lengths = _gather_lengths(
        world, CollectiveCall("pad_across_processes", f"dim={dim}, {description(tensor, _dimensions)}"), lengths
    )
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


def _length(leaf: Tensor, dim: int) -> int | None:
    fits = not leaf.is_nested and -leaf.ndim <= dim < leaf.ndim
    return leaf.shape[dim] if fits else None


def _dimensions(leaf: Tensor) -> str:
    return "nested tensor" if leaf.is_nested else f"tensor of {leaf.ndim} dimensions"


def _gather_lengths(world: World, call: CollectiveCall, lengths: list[int | None]) -> Tensor:
    local_lengths = torch.tensor([length or 0 for length in lengths], dtype=torch.int64)
    rows = exchange_rows(world, call, as_bytes(local_lengths))
    return torch.stack([row.cpu()[: local_lengths.numel() * 8].contiguous().view(torch.int64) for row in rows])


def _padded(leaf: Tensor, dim: int, wanted: int, value: float, *, at_front: bool) -> Tensor:
    shape = list(leaf.shape)
    shape[dim] = wanted
    padded = leaf.new_full(shape, value)
    start = wanted - leaf.shape[dim] if at_front else 0
    padded.narrow(dim, start, leaf.shape[dim]).copy_(leaf)
    return padded


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """The nest of tensors of `batch_size` rows, with zeros after the end of `dim` up to the next multiple of `num_processes`."""
    wanted = -(-batch_size // num_processes) * num_processes
    leaves = tensors_of("pad_input_tensors", tensor)
    return with_leaves(tensor, (_padded(leaf, dim, wanted, 0, at_front=False) for leaf in leaves))
