"""The precision of a step by Megatron: its models keep 16-bit weights, and its optimizers those of 32 bits."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from torch import Tensor

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.precision.base import Precision
from accelerate_nb.runtime.precision.registry import PrecisionOptions

_TYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class MegatronPrecision(Precision):
    """A type in which a model has its weights and computes; `loss_scaler` is Megatron's, where the type is float16."""

    def __init__(self, name: str, options: PrecisionOptions) -> None:
        if name not in _TYPES:
            raise ConfigurationError(
                f"mixed_precision={name!r} was requested with Megatron, which computes in 8 bits where its model is built so. Pass "
                "mixed_precision='bf16', and TransformerConfig(fp8=...) to the model."
            )
        self.name = name
        self.dtype = _TYPES[name]
        self.loss_scaler: Any = None
        if name == "fp16":
            settings = {} if options.scaling is None else options.scaling.to_kwargs()
            # torch's defaults, and no tolerance of an overflow, as torch's scaler has none
            self.loss_scaler = DynamicGradScaler(
                initial_scale=settings.get("init_scale", 65536.0),
                min_scale=1.0,
                growth_factor=settings.get("growth_factor", 2.0),
                backoff_factor=settings.get("backoff_factor", 0.5),
                growth_interval=settings.get("growth_interval", 2000),
                hysteresis=1,
            )

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the factor of float16."""
        return loss if self.loss_scaler is None else loss * self.loss_scaler.scale.to(loss.device)
