"""Tensors of XLA devices in a checkpoint: they have no memory that anything else could read."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from accelerate_nb.runtime.xla import spmd_tensors


def number(tensor: Tensor) -> int:
    """The number of the device's tensor; it stays the same when the tensor is detached."""
    import torch_xla

    return int(torch_xla._XLAC._xla_get_tensor_id(tensor))


def copies_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of the tensors on the CPU, brought in one transfer."""
    if not tensors:
        return []
    if spmd_tensors.is_on():
        return spmd_tensors.whole(tensors)
    import torch_xla

    copies: list[Tensor] = torch_xla._XLAC._xla_get_cpu_tensors([tensor.detach() for tensor in tensors])
    return copies
