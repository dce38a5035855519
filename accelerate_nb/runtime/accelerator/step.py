"""Methods of a training step: forward, backward, clipping, accumulation."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ContextDecorator, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from accelerate_nb.errors import ConfigurationError, StateError
from accelerate_nb.rank.step_hold import current_step_hold
from accelerate_nb.runtime.accelerator.properties import AcceleratorProperties
from accelerate_nb.runtime.compat.dataclasses import AutocastKwargs
from accelerate_nb.runtime.training.accumulation import AccumulationWindows, single_models
from accelerate_nb.runtime.training.optimizer import innermost
from accelerate_nb.user_warnings import warn_user

_NOTHING: AbstractContextManager[Any] = nullcontext()


class StepMethods(AcceleratorProperties):
    """The methods of an `Accelerator` that make a step."""

    has_gone_backward: bool = False
    _divisor: int | None = None

    @property
    def step(self) -> int:
        """The number of micro-steps that the last active models have made since the last end of a loader."""
        return self.windows.count

    @step.setter
    def step(self, step: int) -> None:
        self.windows = AccumulationWindows(step)

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-step ends its window: gradients are exchanged, and optimizers step."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self.gradient_state.sync_gradients = sync_gradients

    @property
    def gradient_accumulation_steps(self) -> int:
        """The number of micro-steps in a step."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, gradient_accumulation_steps: int) -> None:
        settings = {**self.gradient_state.plugin_kwargs, "num_steps": gradient_accumulation_steps}
        self.gradient_state.plugin_kwargs = settings

    def accumulate(self, *models: Any) -> "_MicroStep":
        """
        A block for one micro-step.

        Gradients are exchanged, and optimizers step, in every `gradient_accumulation_steps`-th block and at a loader's end.
        Blocks for different models are counted apart, so each half of a GAN has a block of its own in every batch.

        >>> with accelerator.accumulate(model):  # doctest: +SKIP
        ...     accelerator.backward(model(batch).mean())
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        """
        return _MicroStep(self, single_models(models))

    @contextmanager  # also where the strategy has nothing to do, so that the block can decorate a function
    def no_sync(self, model: Any) -> Iterator[None]:
        """A block whose backwards keep the model's gradients to this process."""
        with self.strategy.hold_gradients(model):
            yield

    @contextmanager
    def trigger_sync_in_backward(self, model: Any) -> Iterator[None]:
        """A block whose backward exchanges gradients although the forward was run in `no_sync`."""
        with self.strategy.send_gradients(model):
            yield

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """
        Compute gradients of the loss, divided by the number of micro-steps in a step.

        With a `learning_rate` and a prepared LOMO optimizer it is `lomo_backward`; other arguments are those of
        `Tensor.backward`.
        """
        self._begin_backward()
        steps = self._divisor or self.gradient_state.num_steps
        with self._backward_phase(loss):
            self.strategy.backward(loss, steps=steps, is_boundary=self.sync_gradients, **kwargs)

    def train_step(
        self,
        model: Any,
        *inputs: Any,
        loss_fn: Callable[..., Tensor] | None = None,
        targets: Any = None,
        **keywords: Any,
    ) -> Tensor:
        """
        Forward, loss and backward of a batch at once; returns the loss, a number on all processes, without its graph.

        The loss is `loss_fn(output, targets)`, or `loss_fn(output)` without targets, and without a function the one that the model
        returns itself (`output.loss`). It has to be a mean over samples: a pipeline cuts `inputs`, `keywords` and `targets` along
        dimension 0, and mixes forwards and backwards of the parts in the order of its schedule. Other strategies do what
        `backward(loss)` does.

        >>> loss = accelerator.train_step(model, images, loss_fn=cross_entropy, targets=labels)  # doctest: +SKIP
        """
        self._begin_backward()
        with self._backward_phase(None):
            return self.strategy.train_step(
                model,
                (inputs, keywords),
                targets,
                partial(_loss, loss_fn),
                steps=self._divisor or self.gradient_state.num_steps,
                is_boundary=self.sync_gradients,
            )

    def _begin_backward(self) -> None:
        self.has_gone_backward = True
        self.gradient_state.training_calls += 1
        current_step_hold().went_backward()

    def _backward_phase(self, loss: Tensor | None) -> AbstractContextManager[Any]:
        """A block whose time is that of the backward, until the last gradient of `loss` is computed."""
        if self.step_metrics is None:
            return _NOTHING
        return self.step_metrics.phases.backward(loss)

    def lomo_backward(self, loss: Tensor, learning_rate: float) -> None:
        """Compute gradients with prepared LOMO optimizers (lomo-optim's), which update the weights in the same backward."""
        if not self.strategy.fused_optimizers:
            raise StateError(
                "lomo_backward was called, but no LOMO optimizer is prepared. Give one to `prepare`, or call `backward`."
            )
        self.strategy.backward(loss, learning_rate=learning_rate)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Bring fp16's gradients back to their true size, of the given optimizers or of all; otherwise nothing to do."""
        chosen = self.bundle.optimizers if optimizer is None else optimizer
        self.strategy.unscale(map(innermost, chosen if isinstance(chosen, (list, tuple)) else [chosen]))

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2) -> Tensor:
        """Scale the gradients down so that their norm is at most `max_norm`; returns the norm that they had."""
        self.strategy.unscale(map(innermost, self.bundle.optimizers))
        norm = self.strategy.clip_norm(parameters, max_norm, norm_type)
        if self.step_metrics is not None:
            self.step_metrics.clipped(norm)
        return norm

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Cut each gradient at plus and minus `clip_value`."""
        self.strategy.unscale(map(innermost, self.bundle.optimizers))
        self.strategy.clip_value(parameters, clip_value)

    @contextmanager
    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Iterator[None]:
        """A block in which operations choose the run's precision; for what is not in a prepared model's forward."""
        with self.precision.autocast(autocast_handler):
            yield

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Any:
        """
        A block in which processes may have different numbers of batches: one that has none left joins the others' collectives.

        `even_batches` holds for the prepared loaders inside the block; of an iterable data set it can't, which is warned of.
        Sharded and split models can't join, as in Accelerate: there the block changes nothing, which is warned of.
        """
        even = self.dataloader_config.even_batches if even_batches is None else even_batches
        joining = nullcontext() if even else self.strategy.join_uneven(joinables)
        if joining is None:
            if self.world.size > 1:
                warn_user(
                    "Joining uneven inputs is only supported for DDP, as a result `join_uneven_inputs` will have no effect. "
                    "Leave even_batches=True, or give the loader drop_last=True."
                )
            yield
            return
        wanted = () if even_batches is None else self.bundle.loaders
        found: list[Any] = [getattr(loader, "batch_sampler", None) for loader in wanted]
        samplers = [sampler for sampler in found if hasattr(sampler, "even_batches")]
        if even_batches is not None and self.world.size > 1 and len(samplers) < len(self.bundle.loaders):
            warn_user(
                "join_uneven_inputs(even_batches=...) is only supported for map-style datasets: "
                f"{len(self.bundle.loaders) - len(samplers)} of {len(self.bundle.loaders)} prepared loaders go on as they were."
            )
        before = [sampler.even_batches for sampler in samplers]
        for sampler in samplers:
            sampler.even_batches = even
        try:
            with joining:
                yield
        finally:
            for sampler, value in zip(samplers, before, strict=True):
                sampler.even_batches = value


@dataclass(eq=False, slots=True)
class _MicroStep(ContextDecorator):
    """A block for one micro-step, or a decorator of what makes one; a class of its own because it is entered in every one."""

    _accelerator: StepMethods
    _models: Sequence[Any]
    _held: ExitStack | None = None

    def __enter__(self) -> None:
        accelerator = self._accelerator
        gradients = accelerator.gradient_state
        at_end = gradients.sync_with_dataloader and gradients.end_of_dataloader
        window = accelerator.windows.of(self._models)
        gradients.sync_gradients = window.advance(gradients.num_steps, at_end=at_end)
        if gradients.average_over_window:
            factor = window.correct(gradients.num_steps, gradients.batches_left, is_last=gradients.sync_gradients)
            accelerator._divisor = window.length
            for model in (self._models or accelerator.bundle.models) if factor != 1 else ():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor)
        if not gradients.sync_gradients and not gradients.sync_each_batch:
            self._held = ExitStack()
            for model in self._models:
                self._held.enter_context(accelerator.strategy.hold_gradients(model))

    def __exit__(self, *error: Any) -> None:
        self._accelerator._divisor = None
        held, self._held = self._held, None
        if held is not None:
            held.__exit__(*error)


def _loss(function: Callable[..., Tensor] | None, output: Any, targets: Any) -> Tensor:
    """The loss of an output: a function's, or the model's own."""
    if function is not None:
        return function(output) if targets is None else function(output, targets)
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(found, Tensor):
        raise ConfigurationError(
            f"train_step was called without loss_fn, but the model's output is a {type(output).__name__} without a loss. Pass "
            "loss_fn=, a function of the output and the targets."
        )
    return found
