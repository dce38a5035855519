"""The precision of an engine, which keeps weights in it and optimizes a copy in 32 bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from accelerate_nb.runtime.compat.kwargs_handlers import AutocastKwargs
from accelerate_nb.runtime.operations.nested import convert_to_fp32, recursively_apply
from accelerate_nb.runtime.precision.amp import BF16

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class EnginePrecision(BF16):
    """The engine's own type: a model gets its inputs in it, and returns float32, as in other strategies."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.dtype = name, _DTYPES[name]
        super().__init__(device)

    def _check(self) -> None:
        """DeepSpeed says itself whether a device has the type."""

    def autocast(self, options: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Nothing to choose: weights are in the type already."""
        return nullcontext()

    def _mixed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def mixed(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = recursively_apply(self._cast, (args, kwargs))
            return convert_to_fp32(forward(*args, **kwargs))

        return mixed

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor
