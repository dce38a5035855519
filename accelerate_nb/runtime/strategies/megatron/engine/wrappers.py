"""The engine's optimizer and schedule under Accelerate's names, and the placeholder of a schedule."""

from __future__ import annotations

from typing import Any

from accelerate_nb.runtime.strategies.placeholder import Placeholder
from accelerate_nb.runtime.training.optimizer import AcceleratedOptimizer, AcceleratedScheduler


class MegatronLMOptimizerWrapper(AcceleratedOptimizer):
    """An optimizer that its engine steps when it is called; its own `step` only notes that a step was made."""

    def __init__(self, optimizer: Any, device_placement: bool = False, *args: Any, **kwargs: Any) -> None:
        # Megatron has placed what the optimizer remembers
        super().__init__(optimizer, False, *args, **kwargs)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the engine left its last step out because a gradient overflowed."""
        return bool(getattr(self.optimizer, "skipped_iter", False))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as Accelerate's
        """Nothing is left to do: `model(**batch)` has made the step."""
        if self._strategy is not None:
            super().step(closure)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Nothing: the engine throws gradients away before it computes new ones."""


class MegatronLMDummyScheduler(Placeholder):
    """
    A placeholder of the schedule that Megatron-LM makes of a plugin's settings.

    `total_num_steps` and `warmup_num_steps` are those of one process, as with Accelerate's schedules; each copy makes its part of them.

    >>> MegatronLMDummyScheduler(None, total_num_steps=100).warmup_num_steps
    0
    """

    made_by = "Megatron"

    def __init__(
        self, optimizer: Any, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: Any
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.kwargs = kwargs


class MegatronLMSchedulerWrapper(AcceleratedScheduler):
    """A schedule that its engine moves when it steps; its own `step` does nothing."""

    def __init__(self, scheduler: Any, optimizers: Any) -> None:
        # without the notice that it moves once for every process
        super().__init__(scheduler, optimizers, split_batches=True)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the engine moves it when it steps."""

    def get_last_lr(self) -> list[float]:
        """The learning rates in force."""
        return [float(group["lr"]) for group in self.scheduler.optimizer.param_groups]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the schedule its state back."""
        # Megatron's moves on by the steps that it finds
        self.scheduler.num_steps = 0
        self.scheduler.load_state_dict(state_dict)
