"""An optimizer that steps when gradients are synchronised."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from accelerate_nb.rank.step_hold import current_step_hold
from accelerate_nb.runtime.precision.base import scaled_step
from accelerate_nb.runtime.strategies.base import Strategy
from accelerate_nb.runtime.training.accumulation import GradientState
from accelerate_nb.runtime.world.registry import current_world
from accelerate_nb.user_warnings import warn_user


def _of_wrapped(name: str) -> Any:
    """A property that is the wrapped optimizer's attribute of this name."""
    return property(
        lambda self: getattr(self.optimizer, name), lambda self, value: setattr(self.optimizer, name, value)
    )


class AcceleratedOptimizer(Optimizer):
    """An optimizer whose `step` and `zero_grad` do nothing while gradients are being accumulated; the rest is the wrapped one's own."""

    def __init__(
        self,
        optimizer: Optimizer,
        device_placement: bool = True,
        scaler: torch.amp.GradScaler | None = None,
        *,
        device: torch.device | None = None,
        before_first_step: Callable[[Any], None] | None = None,
        after_first_step: Callable[[], None] | None = None,
        before_step: Callable[[], None] | None = None,
        after_step: Callable[[Any], None] | None = None,
        strategy: Strategy | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.scaler = scaler
        self.device_placement = device_placement
        self.gradient_state = GradientState()
        self._is_overflow = False
        self._takes_set_to_none = "set_to_none" in inspect.signature(optimizer.zero_grad).parameters
        self._before_first_step, self._after_first_step = before_first_step, after_first_step
        self._before_step, self._after_step = before_step, after_step
        self._strategy = strategy
        self._step_hold = current_step_hold()
        self._step_hold.begin()
        if device_placement and device is not None and optimizer.state:
            for remembered in optimizer.state.values():
                # the count of steps stays where it is: torch keeps it on the CPU unless the optimizer is fused
                moving = {name: value for name, value in remembered.items() if name != "step"}
                remembered.update(
                    {name: value.to(device) for name, value in moving.items() if isinstance(value, torch.Tensor)}
                )

    state = _of_wrapped("state")
    param_groups = _of_wrapped("param_groups")
    defaults = _of_wrapped("defaults")

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was left out because a gradient overflowed."""
        return self._is_overflow

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]  # as Accelerate's
        """Step, if gradients are synchronised."""
        self.gradient_state.training_calls += 1
        if not self.gradient_state.sync_gradients:
            return
        if self._before_first_step is not None:
            check, self._before_first_step = self._before_first_step, None
            check(self)
        if self._before_step is not None:
            self._before_step()
        self._is_overflow = not self._scaled_step(closure)
        if self._after_first_step is not None and not self._is_overflow:
            report, self._after_first_step = self._after_first_step, None
            report()
        if self._after_step is not None:
            self._after_step(self)
        self._step_hold.stepped()

    def _scaled_step(self, closure: Callable[[], Any] | None) -> bool:
        """Step through the strategy, or as the user has assigned `scaler`; returns whether the optimizer stepped."""
        strategy = self._own_strategy()
        if self.scaler is strategy.precision.scaler:
            return strategy.step(self.optimizer, closure)
        if self.scaler is None:
            self.optimizer.step(closure)
            return True
        has_stepped = scaled_step(self.scaler, self.optimizer, closure)
        self.scaler.update()
        return has_stepped

    def use_strategy(self, strategy: Strategy) -> None:
        """Step by this strategy from now on if it has a loss scaler of its own, unless the user has assigned one."""
        scaler = strategy.precision.scaler
        if scaler is not None and self.scaler is self._own_strategy().precision.scaler:
            self.scaler, self._strategy = scaler, strategy

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Throw the gradients away, if they are synchronised."""
        if not self.gradient_state.sync_gradients:
            return
        if self._takes_set_to_none:
            self._own_strategy().zero_grad(self.optimizer, set_to_none=set_to_none is None or set_to_none)
        elif set_to_none is None:
            self._own_strategy().zero_grad(self.optimizer)
        else:
            raise ValueError(f"{type(self.optimizer).__name__}.zero_grad takes no set_to_none. Call it without.")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Give the wrapped optimizer more parameters."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the wrapped optimizer its state back."""
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """Switch a schedule-free optimizer to training."""
        self._switch("train")

    def eval(self) -> None:
        """Switch a schedule-free optimizer to evaluation."""
        self._switch("eval")

    def _switch(self, mode: str) -> None:
        switch = getattr(self.optimizer, mode, None)
        if callable(switch):
            switch()

    def __getstate__(self) -> dict[str, Any]:
        # what is called around steps, and the strategy, belong to this process
        calls = ("_before_first_step", "_after_first_step", "_before_step", "_after_step")
        return {**self.__dict__, **dict.fromkeys(calls), "_strategy": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def _own_strategy(self) -> Strategy:
        if self._strategy is None:
            # one that no `Accelerator` has made steps as one process does; a process that only holds it joins no world
            self._strategy = Strategy(current_world())
        return self._strategy

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"


def innermost(optimizer: Any) -> Any:
    """The optimizer before `prepare`."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


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


# Of strategies with an engine, which steps and moves a schedule by itself


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
