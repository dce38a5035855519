"""The precision of a step; the default is the model's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.compat.enums import PrecisionType
from accelerate_nb.runtime.compat.kwargs_handlers import AutocastKwargs


class Precision:
    """The model's own precision."""

    name: str = "no"
    scaler: torch.amp.GradScaler | None = None

    def wrap_forward(self, model: Module) -> Module:
        """The model, computing in this precision from now on, whatever it computed in before."""
        restore_forward(model)
        return model

    def autocast(self, options: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """A block in which operations choose this precision."""
        return nullcontext()

    def scale(self, loss: Tensor) -> Tensor:
        """The loss as it goes into the backward."""
        return loss

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Bring gradients back to their true size, before something reads them."""

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
        """Let the optimizer step; returns whether it did."""
        optimizer.step(closure)
        return True

    def reset(self, optimizer: Optimizer) -> None:
        """The gradients of an optimizer were thrown away."""


def precision_name(requested: str | PrecisionType | None) -> str:
    """The name of a precision that exists; an unknown one is an error that lists the known ones."""
    name = "no" if requested is None else str(requested).lower()
    if name not in PrecisionType:
        raise ConfigurationError(
            f"mixed_precision={name!r} is not known. Choose one of {', '.join(map(repr, PrecisionType.list()))}."
        )
    return name


def restore_forward(model: Module) -> None:
    """Give a model its own forward back, if `wrap_forward` replaced it."""
    original = model.__dict__.pop("_original_forward", None)
    if original is None:
        return
    if getattr(original, "__func__", None) is type(model).forward:
        model.__dict__.pop("forward", None)
    else:
        model.forward = original
