"""Methods of a training step, and the properties of an `Accelerator` that all of its methods read."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from accelerate_nb.errors import ConfigurationError, NotConfiguredError, StateError
from accelerate_nb.rank.step_hold import current_step_hold
from accelerate_nb.runtime.compat.enums import DistributedType, FP8BackendType
from accelerate_nb.runtime.compat.env_vars import LauncherSettings
from accelerate_nb.runtime.compat.kwargs_handlers import AutocastKwargs, DataLoaderConfiguration, ProjectConfiguration
from accelerate_nb.runtime.data.prepared_loader import cut_for_group
from accelerate_nb.runtime.observability.step_metrics import StepMetrics
from accelerate_nb.runtime.precision.base import Precision
from accelerate_nb.runtime.precision.registry import package_named
from accelerate_nb.runtime.strategies.base import Strategy, devices_of
from accelerate_nb.runtime.training.accumulation import AccumulationWindows, GradientState
from accelerate_nb.runtime.training.optimizer import innermost
from accelerate_nb.runtime.training.prepared import PreparedObjects
from accelerate_nb.runtime.world.state import AcceleratorState, ProcessMethods
from accelerate_nb.runtime.world.world import World
from accelerate_nb.user_warnings import warn_user

_NOTHING: AbstractContextManager[Any] = nullcontext()


class StepMethods(ProcessMethods):
    """The methods of an `Accelerator` that make a step, and its properties."""

    bundle: PreparedObjects
    dataloader_config: DataLoaderConfiguration
    gradient_state: GradientState
    precision: Precision
    project_configuration: ProjectConfiguration
    state: AcceleratorState
    step_metrics: StepMetrics | None
    strategy: Strategy
    windows: AccumulationWindows
    _fp8_recipe: Any
    _world: World
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

    def accumulate(self, *models: Any) -> AbstractContextManager[None]:
        """
        A block for one micro-step.

        Gradients are exchanged, and optimizers step, in every `gradient_accumulation_steps`-th block and at a loader's end.
        Blocks for different models are counted apart, so each half of a GAN has a block of its own in every batch.

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

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """A block in which operations choose the run's precision; for what is not in a prepared model's forward."""
        return self.precision.autocast(autocast_handler)

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Any:
        """
        A block in which processes may have different numbers of batches: one that has none left joins the others' collectives.

        `even_batches` holds for the prepared loaders inside the block; of an iterable data set it can't, which is warned of.
        """
        even = self.dataloader_config.even_batches if even_batches is None else even_batches
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
            if even:
                yield
            else:
                with self.strategy.join_uneven(joinables):
                    yield
        finally:
            for sampler, value in zip(samplers, before, strict=True):
                sampler.even_batches = value

    @property
    def world(self) -> World:
        """This process among the others: ranks, devices, groups."""
        return self._world

    @property
    def distributed_type(self) -> DistributedType:
        """The type of connection between the processes."""
        return self.strategy.distributed_type

    @property
    def mixed_precision(self) -> str:
        """The name of the precision that a step is computed in."""
        return self.precision.name

    @property
    def native_amp(self) -> bool:
        """Whether `torch.autocast` is at work."""
        return self.precision.name != "no"

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The scaler of the loss in fp16."""
        return self.precision.scaler

    @property
    def fp8_backend(self) -> FP8BackendType:
        """The package that computes in 8-bit floats; "NO" where none does."""
        recipe = self._fp8_recipe
        return recipe.package if recipe else package_named(LauncherSettings.read(os.environ).fp8_package)

    @property
    def multi_device(self) -> bool:
        """Whether there are several processes, each on an accelerator."""
        return self.world.size > 1 and self.device.type != "cpu"

    @property
    def project_dir(self) -> str | None:
        """The folder of the project's files."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """The folder of the project's logs."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next checkpoint."""
        return self.project_configuration.iteration

    @property
    def split_batches(self) -> bool:
        """Whether a batch of the loader is cut into one part for each process."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether the main process reads for all."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether samples are repeated so that all processes have equally many."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, even_batches: bool) -> None:
        self.dataloader_config.even_batches = even_batches

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether the order of samples depends on nothing but seed and epoch."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches go to the device while the process goes on."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether loaders are torchdata's stateful ones."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether some optimizer left its last step out because a gradient overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self.bundle.optimizers)

    @property
    def stop_requested(self) -> bool:
        """
        Whether a stop of the run was requested, and its last step is made; it turns true after the same step on all ranks.

        Where no steps are made, in an evaluation or with optimizers that are not prepared, it turns true at the same read of
        all ranks, as counted from the beginning; ranks that are many reads apart stop each at its next one.

        A function in which every rank reads this property ends by itself and returns what it has, which is then what the launch
        returns. Where some rank never reads it, a kind of `KeyboardInterrupt` is raised in all of them after that step instead.

        >>> for batch in loader:  # doctest: +SKIP
        ...     ...
        ...     optimizer.step()
        ...     if accelerator.stop_requested:
        ...         break
        """
        return current_step_hold().checked()

    # Of a model that is spread over processes

    @property
    def is_fsdp2(self) -> bool:
        """Whether weights are sharded, by the second version of FSDP."""
        return bool(self.state.is_fsdp2)

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether ways to split a model can be combined."""
        return self.is_fsdp2

    @property
    def parallelism_config(self) -> Any:
        """The configuration of how the model is split; `None` where every process has all of it."""
        return self.state.parallelism_config

    @property
    def deepspeed_plugin(self) -> Any:
        """The plugin of DeepSpeed; `None` without DeepSpeed."""
        return self.state.deepspeed_plugin

    @property
    def torch_device_mesh(self) -> Any:
        """The mesh of processes over which the model is split; `None` where it isn't."""
        return self.state.device_mesh

    @property
    def tensor_parallel_rank(self) -> int:
        """The index of this process's part of each layer's width; `StateError` where the model isn't split."""
        return self._part_along("tp", "Tensor parallelism")

    @property
    def data_parallel_rank(self) -> int:
        """The index of the model copy that this process belongs to; `StateError` where the model isn't split."""
        return self._part_along("dp_replicate", "Data parallelism in a mesh")

    @property
    def data_parallel_shard_rank(self) -> int:
        """The index of this process's shard of the model; `StateError` where the model isn't split."""
        return self._part_along("dp_shard", "Sharded data parallelism")

    @property
    def pipeline_parallel_rank(self) -> int:
        """The index of this process in its pipeline; `NotConfiguredError` where the model isn't split."""
        return self._part_along("pp", "Pipeline parallelism", NotConfiguredError)

    @property
    def context_parallel_rank(self) -> int:
        """The index of this process's part of the sequences; `NotConfiguredError` where the model isn't split."""
        return self._part_along("cp", "Context parallelism", NotConfiguredError)

    def maybe_context_parallel(
        self,
        buffers: list[Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """
        A block in which `buffers` are this process's parts of themselves along the dimensions `buffer_seq_dims`, where sequences are cut.

        They are changed in place, and are whole again after it, but for `no_restore_buffers`. What comes from a prepared loader is a part
        already, and stays as it is.
        """
        context = self.strategy.context
        if context is None:
            return nullcontext()
        return context.cut_buffers(buffers or [], buffer_seq_dims or [], list(no_restore_buffers or ()))

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """
        The loader with sequences cut for a model, where DeepSpeed splits them and the loader was prepared in a call without the model.

        It gives a batch of each process that shares them, one after the other, as parts: `sp_size` times as many as the loader.
        Anything else comes back as it is.
        """
        return cut_for_group(dl, self.strategy.batch_cutter, self.world.mesh.sp, self.device)

    def verify_device_map(self, model: Module) -> bool:
        """Whether a model, or a part of it, was loaded with its weights on several devices."""
        return any(len(devices_of(module)) > 1 for module in model.modules())

    def _part_along(self, axis: str, part: str, error: type[StateError] = StateError) -> int:
        if self.parallelism_config is None:
            raise error(f"{part} is not configured. Give the Accelerator a `parallelism_config` first.")
        mesh = self.torch_device_mesh
        return int(mesh.get_local_rank(axis)) if axis in (mesh.mesh_dim_names or ()) else 0

    # Accelerate's names for what was prepared
    _models = property(attrgetter("bundle.models"))
    _optimizers = property(attrgetter("bundle.optimizers"))
    _schedulers = property(attrgetter("bundle.schedulers"))
    _dataloaders = property(attrgetter("bundle.loaders"))
    _custom_objects = property(attrgetter("bundle.custom"))


@dataclass(eq=False, slots=True)
class _MicroStep:
    """A block for one micro-step; a class of its own because it is entered in every one."""

    _accelerator: StepMethods
    _models: tuple[Any, ...]
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
        if self._held is not None:
            self._held.__exit__(*error)


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
