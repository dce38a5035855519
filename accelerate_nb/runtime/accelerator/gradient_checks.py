"""Mistakes that change the numbers and raise nothing: looked for once, at an optimizer's first step."""

from __future__ import annotations

from typing import Any, Protocol

from accelerate_nb.notices import notice
from accelerate_nb.runtime.bundle import Bundle
from accelerate_nb.runtime.strategies.base import Strategy


class Watched(Protocol):
    """What is known of a training when an optimizer makes its first step."""

    bundle: Bundle
    strategy: Strategy
    has_gone_backward: bool

    @property
    def gradient_accumulation_steps(self) -> int:
        """How many micro-steps make a step."""


def look(training: Watched, optimizer: Any) -> None:
    """Warn of what is wrong with the gradients that an optimizer is going to use."""
    learning = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
    if not learning:
        return
    steps = training.gradient_accumulation_steps
    if steps > 1 and not training.has_gone_backward:
        notice(
            f"The gradients of {steps} micro-steps are added up by loss.backward(), so they are {steps} times as large as for "
            "one batch. Call accelerator.backward(loss), which divides the loss."
        )
    for text in training.strategy.unshared(training.bundle.models, learning):
        notice(text)
