"""The verbs of a training step: forward, backward, clipping, accumulation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor

from accelerate_nb.runtime.accumulation import GradientState
from accelerate_nb.runtime.bundle import Bundle
from accelerate_nb.runtime.handlers import AutocastKwargs, DataLoaderConfiguration
from accelerate_nb.runtime.optimizer import innermost
from accelerate_nb.runtime.precision.base import Precision
from accelerate_nb.runtime.process import Process
from accelerate_nb.runtime.strategies.base import Strategy


class Stepping(Process):
    """What an `Accelerator` does in each step."""

    bundle: Bundle
    dataloader_config: DataLoaderConfiguration
    gradient_state: GradientState
    precision: Precision
    step: int
    strategy: Strategy

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-step ends its window: gradients are exchanged, and optimizers step."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self.gradient_state.sync_gradients = sync_gradients

    @property
    def gradient_accumulation_steps(self) -> int:
        """How many micro-steps make a step."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, gradient_accumulation_steps: int) -> None:
        settings = {**self.gradient_state.plugin_kwargs, "num_steps": gradient_accumulation_steps}
        self.gradient_state.plugin_kwargs = settings

    def accumulate(self, *models: Any) -> AbstractContextManager[None]:
        """
        A block for one micro-step.

        Gradients are exchanged, and optimizers step, in every `gradient_accumulation_steps`-th block and at a loader's end.

        >>> with accelerator.accumulate(model):  # doctest: +SKIP
        ...     accelerator.backward(model(batch).mean())
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        """
        return _MicroStep(self, models)

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        """A block whose backwards keep the model's gradients to this process."""
        return self.strategy.hold_gradients(model)

    def trigger_sync_in_backward(self, model: Any) -> AbstractContextManager[Any]:
        """A block whose backward exchanges gradients although the forward was run in `no_sync`."""
        return self.strategy.send_gradients(model)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Compute gradients of the loss, divided by the number of micro-steps in a step."""
        steps = self.gradient_state.num_steps
        if steps != 1:
            loss = loss / steps
        self.strategy.backward(self.precision.scale(loss), **kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Bring fp16's gradients back to their true size, of the given optimizers or of all; otherwise nothing to do."""
        chosen = self.bundle.optimizers if optimizer is None else optimizer
        self.precision.unscale(map(innermost, chosen if isinstance(chosen, (list, tuple)) else [chosen]))

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2) -> Tensor:
        """Scale the gradients down so that their norm is at most `max_norm`; returns the norm that they had."""
        self.precision.unscale(map(innermost, self.bundle.optimizers))
        return self.strategy.clip_norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Cut each gradient at plus and minus `clip_value`."""
        self.precision.unscale(map(innermost, self.bundle.optimizers))
        self.strategy.clip_value(parameters, clip_value)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """A block in which operations choose the run's numbers; for what is not in a prepared model's forward."""
        return self.precision.autocast(autocast_handler)

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Any:
        """
        A block in which processes may have different numbers of batches: who has none left answers the others.

        `even_batches` holds for the prepared loaders inside the block.
        """
        even = self.dataloader_config.even_batches if even_batches is None else even_batches
        samplers = [] if even_batches is None else [*filter(_can_be_even, map(_batch_sampler, self.bundle.loaders))]
        before = [sampler.even_batches for sampler in samplers]
        for sampler in samplers:
            sampler.even_batches = even
        try:
            if even:
                yield
            else:
                with self.strategy.join_uneven(joinables):
                    yield
        finally:
            for sampler, value in zip(samplers, before, strict=True):
                sampler.even_batches = value


class _MicroStep:
    """A block for one micro-step; a class of its own because it is entered in every one."""

    __slots__ = ("_accelerator", "_held", "_models")

    def __init__(self, accelerator: Stepping, models: tuple[Any, ...]) -> None:
        self._accelerator = accelerator
        self._models = models
        self._held: ExitStack | None = None

    def __enter__(self) -> None:
        accelerator = self._accelerator
        gradients = accelerator.gradient_state
        if gradients.sync_with_dataloader and gradients.end_of_dataloader:
            accelerator.step = 0
            gradients.sync_gradients = True
        else:
            accelerator.step += 1
            gradients.sync_gradients = accelerator.step % gradients.num_steps == 0
        if not gradients.sync_gradients and not gradients.sync_each_batch:
            self._held = ExitStack()
            for model in self._models:
                self._held.enter_context(accelerator.strategy.hold_gradients(model))

    def __exit__(self, *error: Any) -> None:
        if self._held is not None:
            self._held.__exit__(*error)


def _batch_sampler(loader: Any) -> Any:
    return getattr(loader, "batch_sampler", None)


def _can_be_even(sampler: Any) -> bool:
    return hasattr(sampler, "even_batches")
