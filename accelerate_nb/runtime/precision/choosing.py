"""Which precision a name means on a device."""

from __future__ import annotations

import torch

from accelerate_nb.errors import ConfigurationError, NotYetError
from accelerate_nb.runtime.handlers import AutocastKwargs, GradScalerKwargs
from accelerate_nb.runtime.kinds import PrecisionType
from accelerate_nb.runtime.precision.amp import BF16, FP16
from accelerate_nb.runtime.precision.base import Precision


def precision_name(asked: str | PrecisionType | None) -> str:
    """The name of a precision that exists; an unknown one is an error that lists the known ones."""
    name = "no" if asked is None else str(asked).lower()
    if name not in PrecisionType.list():
        raise ConfigurationError(
            f"mixed_precision={name!r} is not known. Choose one of {', '.join(map(repr, PrecisionType.list()))}."
        )
    if name == "fp8":
        raise NotYetError("mixed_precision='fp8' is not offered here yet. Use 'bf16'.")
    return name


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
