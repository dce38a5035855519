"""Tensors whose numbers are on another process: they have a shape, a dtype and a device, and what is computed of them has too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from accelerate_nb.errors import StateError


class AbsentTensor(Tensor):
    """
    A tensor without numbers, for the forward of a model some of whose layers are on other processes.

    An operation on it returns absent tensors of the shapes that it would have. Reading a number, or writing to a tensor that has
    numbers, raises `StateError`. `layers` are the indices of the layers of whose outputs it was computed since.
    """

    meta: Tensor
    layers: frozenset[int]

    @staticmethod
    def __new__(
        cls: type[AbsentTensor], meta: Tensor, device: torch.device, layers: frozenset[int] = frozenset()
    ) -> AbsentTensor:
        made: AbsentTensor = Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=device
        )
        made.meta, made.layers = meta, layers
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch gives no type
        return f"AbsentTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch gives it as a function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """The operation on shapes alone."""
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise StateError(
                "A number of a tensor was requested that another stage of the pipeline computes. Pass on what later layers need "
                "through the layers' inputs, or put these layers into one stage."
            )
        if func._schema.is_mutable and not isinstance(args[0], AbsentTensor):
            raise StateError(
                f"{func} would write to a tensor what another stage of the pipeline computes. Put these layers into one stage."
            )
        absent = absent_in([args, kwargs])
        device, layers = absent[0].device, frozenset().union(*(tensor.layers for tensor in absent))
        found = func(*to_meta(args), **to_meta(kwargs))
        return tree_map(lambda leaf: AbsentTensor(leaf, device, layers) if isinstance(leaf, Tensor) else leaf, found)


def to_meta(values: Any) -> Any:
    """A nest with shapes alone in place of tensors, and the meta device in place of others."""

    def shape_of(leaf: Any) -> Any:
        if isinstance(leaf, AbsentTensor):
            return leaf.meta
        if isinstance(leaf, Tensor):
            return leaf.detach().to("meta")
        return torch.device("meta") if isinstance(leaf, torch.device) else leaf

    return tree_map(shape_of, values)


def absent_in(values: Any) -> list[AbsentTensor]:
    """The tensors of a nest whose numbers are on another process."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, AbsentTensor)]
