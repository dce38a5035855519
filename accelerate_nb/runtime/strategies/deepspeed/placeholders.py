"""Placeholders of an optimizer and a schedule that DeepSpeed's configuration names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate_nb.runtime.strategies.placeholder import Placeholder


class DummyOptim(Placeholder):
    """
    A placeholder of the optimizer that DeepSpeed's configuration names.

    `lr` and `weight_decay` take the place of "auto" in `optimizer.params`; what DeepSpeed makes stands in its place after `prepare`.

    >>> DummyOptim([], lr=3e-4).lr
    0.0003
    """

    made_by = "DeepSpeed"

    def __init__(self, params: Any, lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params = params
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


class DummyScheduler(Placeholder):
    """
    A placeholder of the schedule that DeepSpeed's configuration names, or that `lr_scheduler_callable(optimizer)` makes.

    `total_num_steps` and `warmup_num_steps` take the place of "auto" in `scheduler.params`.
    """

    made_by = "DeepSpeed"

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs
