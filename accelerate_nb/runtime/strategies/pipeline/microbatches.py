"""A batch in parts along its first dimension, and the outputs of the parts as that of the whole."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from accelerate_nb.errors import DataError


def batch_size(inputs: Any) -> int:
    """The number of samples: the length of the first tensor that has a dimension."""
    found = next((leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor) and leaf.ndim), None)
    if found is None:
        raise DataError(
            "A model that is split into stages got no tensor of samples. Pass it a batch whose first dimension is the samples'."
        )
    return len(found)


def microbatches(inputs: Any, count: int) -> list[Any]:
    """The inputs in so many parts, at most one a sample; tensors are cut along dimension 0, other things go to every part."""
    size = batch_size(inputs)
    leaves, structure = tree_flatten(inputs)
    count = min(count, size)
    cut = [
        leaf.tensor_split(count) if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == size else [leaf] * count
        for leaf in leaves
    ]
    return [tree_unflatten(list(part), structure) for part in zip(*cut, strict=True)]


def merged(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """The outputs of parts as the whole batch's: tensors joined along dimension 0, numbers averaged over samples, else the first's."""

    def joined(*leaves: Any) -> Any:
        if not isinstance(leaves[0], Tensor):
            return leaves[0]
        if leaves[0].ndim:
            return torch.cat(leaves)
        weights = torch.tensor(sizes, dtype=torch.float32, device=leaves[0].device)
        return ((torch.stack(leaves) * (weights / weights.sum())).sum()).to(leaves[0].dtype)

    return tree_map(joined, *outputs)


def output_on_all(output: Any, source: int, group: Any, device: torch.device) -> Any:
    """A rank's output on all processes of a group; objects in it that are no plain values, such as a cache, stay with that rank."""

    def described(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        return leaf if isinstance(leaf, (bool, int, float, str)) else None

    def filled(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensor = leaf.detach().contiguous() if is_source else torch.empty_like(leaf, device=device)
        dist.broadcast(tensor, source, group=group)
        return tensor

    is_source = dist.get_rank() == source
    held = [tree_map(described, output)]
    dist.broadcast_object_list(held, source, group=group)
    return tree_map(filled, output if is_source else held[0])
