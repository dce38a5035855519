"""A learning-rate schedule that moves when its optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accelerate_nb.runtime.training.accumulation import GradientState
from accelerate_nb.runtime.world.registry import current_world
from accelerate_nb.user_warnings import warn_user

_WARN_USER = (
    "A prepared learning-rate schedule moves {} times in a step, once for every process, as with Hugging Face Accelerate: give "
    "it the number of steps that one process would make. To move it once in a step, use split_batches=True or "
    "step_scheduler_with_optimizer=False."
)


class ScheduleNotice(UserWarning):
    """A schedule moves more often than steps are made; shown once, on the main process, and no sign of a mistake."""


class AcceleratedScheduler:
    """
    A schedule that moves when its optimizer has stepped, once for every process.

    A loop written for one process then sees the same learning rate at the same sample, whatever the number of processes,
    because each step reads one batch per process; with `split_batches` it moves once. This is Accelerate's rule.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Any,
        step_with_optimizer: bool = True,
        split_batches: bool = False,
        *,
        replicas: int | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers: Sequence[Any] = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        self.step_with_optimizer = step_with_optimizer
        self.split_batches = split_batches
        self.gradient_state = GradientState()
        self._moves = 1 if split_batches else (replicas or current_world().size)
        if step_with_optimizer and self._moves > 1 and current_world().is_main:
            warn_user(_WARN_USER.format(self._moves), ScheduleNotice)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Move on, if the optimizer stepped."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
        elif not self.gradient_state.sync_gradients:
            if self.gradient_state.adjust_scheduler:
                self.scheduler._step_count += 1
        elif not any(optimizer.step_was_skipped for optimizer in self.optimizers):
            for _ in range(self._moves):
                if not self.split_batches and self._is_over():
                    return
                self.scheduler.step(*args, **kwargs)

    def _is_over(self) -> bool:
        """Whether a schedule of a known length is at its end: OneCycleLR refuses to go on, which an uneven last batch needs."""
        total: int | None = getattr(self.scheduler, "total_steps", None)
        return total is not None and self.scheduler._step_count > total

    def get_last_lr(self) -> Any:
        """The learning rates in force."""
        return self.scheduler.get_last_lr()

    def get_lr(self) -> Any:
        """The learning rates that the schedule computes."""
        return self.scheduler.get_lr()

    def print_lr(self, *args: Any, **kwargs: Any) -> Any:
        """The schedule's own `print_lr`, which newer versions of torch don't have."""
        return self.scheduler.print_lr(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """The schedule's state."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the schedule its state back."""
        self.scheduler.load_state_dict(state_dict)
