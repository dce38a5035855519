"""Which precision a name means on a device."""

from __future__ import annotations

import torch

from accelerate_nb.runtime.handlers import AutocastKwargs, GradScalerKwargs
from accelerate_nb.runtime.precision.amp import BF16, FP16
from accelerate_nb.runtime.precision.base import Precision


def choose_precision(
    name: str,
    device: torch.device,
    autocast: AutocastKwargs | None = None,
    scaling: GradScalerKwargs | None = None,
) -> Precision:
    """The precision of a name that `precision_name` returned."""
    if name == "bf16":
        return BF16(device, autocast)
    if name == "fp16":
        return FP16(device, autocast, scaling)
    return Precision()
