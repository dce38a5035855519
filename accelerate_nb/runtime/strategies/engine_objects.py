"""What strategies with an engine share: placeholders of what it makes, and the optimizer and the schedule that it moves itself."""

from typing import Any, ClassVar

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.training.optimizer import AcceleratedOptimizer, AcceleratedScheduler


class Placeholder:
    """An object that stands for another one, which a strategy of the name `made_by` makes in `prepare`."""

    made_by: ClassVar[str]


def refuse_placeholder(item: Any) -> None:
    """Raise `ConfigurationError` where an object is a placeholder that this run's strategy has left as it is."""
    if isinstance(item, Placeholder):
        raise ConfigurationError(
            f"prepare was given a {type(item).__name__}, a placeholder of what {item.made_by} makes, in a run that does not train "
            f"with it. Pass strategy={item.made_by.lower()!r}, or an object of your own in its place."
        )


class EngineOptimizer(AcceleratedOptimizer):
    """An optimizer that its engine steps; its own `step` has the strategy look at that step. `skips` is its mark of a step left out."""

    skips: ClassVar[str]

    def __init__(self, optimizer: Any, device_placement: bool = False, *args: Any, **kwargs: Any) -> None:
        # the engine has placed what the optimizer remembers
        super().__init__(optimizer, False, *args, **kwargs)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was left out because a gradient overflowed."""
        return bool(getattr(self.optimizer, self.skips, False))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as Accelerate's
        """Have the strategy end the step, if gradients are synchronised."""
        if self._strategy is not None:
            super().step(closure)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Nothing: the engine throws gradients away itself."""


class EngineSchedule(AcceleratedScheduler):
    """A schedule that its engine moves when it steps; its own `step` does nothing."""

    def __init__(self, scheduler: Any, optimizers: Any) -> None:
        # without the notice that it moves once for every process
        super().__init__(scheduler, optimizers, split_batches=True)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the engine moves it when it steps."""
