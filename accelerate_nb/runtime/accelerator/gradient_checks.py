"""Mistakes that change the numbers and raise nothing: checked once, at an optimizer's first step."""

from __future__ import annotations

from typing import Any, Protocol

from accelerate_nb.runtime.accelerator.prepared import PreparedObjects
from accelerate_nb.runtime.strategies.base import Strategy
from accelerate_nb.user_warnings import warn_user


class TrainingState(Protocol):
    """The facts of a training when an optimizer makes its first step."""

    bundle: PreparedObjects
    strategy: Strategy
    has_gone_backward: bool

    @property
    def gradient_accumulation_steps(self) -> int:
        """The number of micro-steps in a step."""


def check_gradients(training: TrainingState, optimizer: Any) -> None:
    """Warn of what is wrong with the gradients that an optimizer is going to use."""
    learning = [item for group in optimizer.param_groups for item in group["params"] if item.grad is not None]
    if not learning:
        return
    steps = training.gradient_accumulation_steps
    if steps > 1 and not training.has_gone_backward:
        warn_user(
            f"The gradients of {steps} micro-steps are added up by loss.backward(), so they are {steps} times as large as for "
            "one batch. Call accelerator.backward(loss), which divides the loss."
        )
    for text in training.strategy.unshared(training.bundle.models, learning):
        warn_user(text)
