"""The gradient scaler of fp16, for weights that are whole, replicated or sharded."""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class MixedLayoutGradScaler(torch.amp.GradScaler):
    """
    A gradient scaler for optimizers whose weights have several layouts: plain tensors, and DTensors along any mesh.

    An overflow in one rank's shard is known to all ranks. torch's own scaler unscales all gradients of a device in one call, which
    takes the first one's layout for that of all, and refuses plain tensors beside DTensors (`found_inf_reduce_handler` in
    torch/distributed/tensor/_dispatch.py, torch 2.13). `share_overflow` is called with a number that is above 0 where one of this
    process's gradients overflows, and has to make it so on all processes that step together.
    """

    share_overflow: Callable[[Tensor], None] | None = None

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found: dict[torch.device, Tensor] = {}
        for weights in _by_layout(optimizer):
            part: Any = SimpleNamespace(param_groups=[{"params": weights}])
            overflows = super()._unscale_grads_(part, inv_scale, found_inf, allow_fp16)
            for device, overflow in overflows.items():
                found[device] = found[device] + overflow if device in found else overflow
        if self.share_overflow is not None:
            # a process whose weights have no gradients shares what others found, too
            for overflow in (found or {inv_scale.device: found_inf}).values():
                self.share_overflow(overflow)
        return found or {inv_scale.device: found_inf}


def _by_layout(optimizer: Optimizer) -> Collection[list[Tensor]]:
    """The weights that have gradients, those whose gradients have the same layout together."""
    found: dict[Any, list[Tensor]] = {}
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if weight.grad is not None:
                placements = getattr(weight.grad, "placements", None)
                layout = None if placements is None else (weight.grad.device_mesh, placements)
                found.setdefault(layout, []).append(weight)
    return found.values()
