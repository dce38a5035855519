"""The engine, its optimizer and its schedule under Accelerate's names."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from accelerate_nb.runtime.training.optimizer import AcceleratedOptimizer, AcceleratedScheduler


class DeepSpeedEngineWrapper:
    """A DeepSpeed engine whose backward makes the step, too, where gradients are synchronised, as Accelerate has it."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def backward(self, loss: Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Compute gradients, and step with `sync_gradients`."""
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)
        if sync_gradients:
            self.engine.step()

    def get_global_grad_norm(self) -> Any:
        """The norm of all gradients in the last step, a number; `None` before it."""
        norm = self.engine.get_global_grad_norm()
        return norm.item() if isinstance(norm, Tensor) else norm


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """An optimizer that its engine steps; by itself it does nothing."""

    def __init__(self, optimizer: Any, device_placement: bool = False, *args: Any, **kwargs: Any) -> None:
        # the engine has placed what the optimizer remembers
        super().__init__(optimizer, False, *args, **kwargs)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was left out because a gradient overflowed."""
        return bool(getattr(self.optimizer, "overflow", False))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as Accelerate's
        """Have the engine step, if gradients are synchronised."""
        if self._strategy is not None:
            super().step(closure)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Nothing: the engine throws gradients away when it has stepped."""


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """A schedule that its engine moves; its own `step` does nothing."""

    def __init__(self, scheduler: Any, optimizers: Any) -> None:
        # without the notice that it moves once for every process
        super().__init__(scheduler, optimizers, split_batches=True)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the engine moves it when it steps."""
