"""What tensors of XLA devices are to a checkpoint, as they have no memory that anything else could look at."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from accelerate_nb.runtime.sharding import spmd


def number(tensor: Tensor) -> int:
    """Which of the device's tensors this is; it stays the same one when it is detached."""
    import torch_xla

    return int(torch_xla._XLAC._xla_get_tensor_id(tensor))


def copies_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of the tensors on the CPU, brought in one transfer."""
    if not tensors:
        return []
    if spmd.is_on():
        return spmd.whole(tensors)
    import torch_xla

    copies: list[Tensor] = torch_xla._XLAC._xla_get_cpu_tensors([each.detach() for each in tensors])
    return copies
