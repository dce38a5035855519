"""The `Accelerator`: it keeps what was prepared, and passes each verb on to the room that answers it."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accelerate_nb.errors import ConfigurationError, NotYetError
from accelerate_nb.events.asks import current_asks
from accelerate_nb.runtime import current
from accelerate_nb.runtime.accumulation import GradientState
from accelerate_nb.runtime.bundle import Bundle, add, is_prepared
from accelerate_nb.runtime.checkpoints.saving import Saver
from accelerate_nb.runtime.compiling import TorchDynamoPlugin, choose_plugin
from accelerate_nb.runtime.data.loading import prepare_data_loader
from accelerate_nb.runtime.data.skipping import skip_first_batches
from accelerate_nb.runtime.environment import Asked
from accelerate_nb.runtime.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProjectConfiguration,
)
from accelerate_nb.runtime.kinds import DistributedType, DynamoBackend, FP8BackendType, PrecisionType, RNGType
from accelerate_nb.runtime.later.base import refuse
from accelerate_nb.runtime.memory import release_memory
from accelerate_nb.runtime.metrics import gather_for_metrics
from accelerate_nb.runtime.mistakes import look
from accelerate_nb.runtime.operations import collective, padding
from accelerate_nb.runtime.optimizer import AcceleratedOptimizer, innermost
from accelerate_nb.runtime.precision.base import precision_name
from accelerate_nb.runtime.precision.choosing import choose_precision, choose_recipe, package_named
from accelerate_nb.runtime.precision.fp8_ao import AORecipeKwargs
from accelerate_nb.runtime.precision.fp8_msamp import MSAMPRecipeKwargs
from accelerate_nb.runtime.precision.fp8_te import TERecipeKwargs
from accelerate_nb.runtime.process import AcceleratorState, join
from accelerate_nb.runtime.profiling import ProfileKwargs
from accelerate_nb.runtime.scheduler import AcceleratedScheduler
from accelerate_nb.runtime.sharding.plan import XlaMesh
from accelerate_nb.runtime.staying import stays
from accelerate_nb.runtime.strategies.choosing import choose_strategy
from accelerate_nb.runtime.trackers.choosing import filter_trackers
from accelerate_nb.runtime.trackers.panel import PanelTracker
from accelerate_nb.runtime.unwrapping import extract_model_from_parallel
from accelerate_nb.runtime.verbs.saving import Saving
from accelerate_nb.runtime.verbs.splitting import Splitting
from accelerate_nb.runtime.verbs.stepping import Stepping
from accelerate_nb.runtime.verbs.watching import Watching
from accelerate_nb.runtime.world import World

T = TypeVar("T")
H = TypeVar("H", bound=KwargsHandler)

_HANDLERS = (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    AORecipeKwargs,
    TERecipeKwargs,
    MSAMPRecipeKwargs,
    XlaMesh,
)


class Accelerator(Stepping, Saving, Splitting, Watching):
    """
    What turns a training loop for one process into one for many: same calls, same numbers.

    >>> accelerator = Accelerator()
    >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # doctest: +SKIP
    >>> accelerator.backward(loss)  # doctest: +SKIP
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: PrecisionType | str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: list[str | RNGType] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[KwargsHandler] | None = None,
        dynamo_backend: DynamoBackend | str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
    ) -> None:
        refuse(
            "Accelerator",
            deepspeed_plugin=deepspeed_plugin,
            deepspeed_plugins=deepspeed_plugins,
            fsdp_plugin=fsdp_plugin,
            torch_tp_plugin=torch_tp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
            parallelism_config=parallelism_config,
        )
        asked = Asked.read(os.environ)
        self.compiling = choose_plugin(dynamo_backend, dynamo_plugin)
        handlers = _by_class(kwargs_handlers or [])
        self.autocast_handler = _pick(handlers, AutocastKwargs)
        self.ddp_handler = _pick(handlers, DistributedDataParallelKwargs)
        self.scaler_handler = _pick(handlers, GradScalerKwargs)
        self.init_handler = _pick(handlers, InitProcessGroupKwargs)
        self.profile_handler = _pick(handlers, ProfileKwargs)
        mesh = _pick(handlers, XlaMesh) or XlaMesh()
        name = precision_name(mixed_precision if mixed_precision is not None else asked.mixed_precision)
        accumulation = _accumulation(gradient_accumulation_plugin, gradient_accumulation_steps, asked)

        meeting = {} if self.init_handler is None else self.init_handler.to_kwargs()
        self._world = join(cpu=cpu or asked.cpu, xla_mesh=mesh.axes, **meeting)
        self.state = AcceleratorState(name, cpu or asked.cpu, _from_accelerator=True)
        self.state.dynamo_plugin = self.compiling
        self.gradient_state = GradientState(accumulation)
        self.strategy = choose_strategy(self._world, self.ddp_handler, mesh)
        self.state.xla_mesh = self.strategy.mesh or None
        self._fp8_recipe = choose_recipe(name, handlers.values(), asked.fp8_package)
        self.precision = choose_precision(
            name, self.device, self.autocast_handler, self.scaler_handler, self._fp8_recipe
        )
        self.bundle = Bundle()
        self._life = current.life()
        self._saver = Saver(self._world)

        self.device_placement = device_placement
        self.dataloader_config = _loading(dataloader_config, split_batches)
        progress = self.dataloader_config.progress
        self._shows_epochs = asked.loader_progress if progress is None else progress
        self.project_configuration = project_config or ProjectConfiguration()
        if project_dir is not None and self.project_configuration.project_dir is None:
            self.project_configuration.set_directories(os.fspath(project_dir))
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.rng_types = ["generator"] if rng_types is None else rng_types
        self.step = 0
        self.flag_tensor: Tensor | None = None
        self.log_with = filter_trackers(log_with, self.logging_dir)
        self.panel = PanelTracker()
        self.trackers: list[Any] = []
        self._save_model_state_pre_hook: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self._load_model_state_pre_hook: OrderedDict[int, Callable[..., None]] = OrderedDict()

    # What it is

    @property
    def world(self) -> World:
        """The process's place."""
        return self._world

    @property
    def distributed_type(self) -> DistributedType:
        """How the processes are connected."""
        return self.strategy.distributed_type

    @property
    def mixed_precision(self) -> str:
        """The name of the numbers that a step is computed in."""
        return self.precision.name

    @property
    def native_amp(self) -> bool:
        """Whether `torch.autocast` is at work."""
        return self.precision.name != "no"

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """What scales the loss in fp16."""
        return self.precision.scaler

    @property
    def fp8_backend(self) -> FP8BackendType:
        """The package that computes in 8-bit floats; "NO" where none does."""
        return self._fp8_recipe.package if self._fp8_recipe else package_named(Asked.read(os.environ).fp8_package)

    @property
    def multi_device(self) -> bool:
        """Whether there are several processes, each on an accelerator."""
        return self.world.size > 1 and self.device.type != "cpu"

    @property
    def project_dir(self) -> str | None:
        """Where the project keeps its files."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """Where the project keeps its logs."""
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
        Whether the run was asked to stop, and has made its last step; it turns true after the same step on all ranks.

        A function in which every rank looks here ends by itself and returns what it has, which is then what the launch
        returns. Where some rank never looks, a kind of `KeyboardInterrupt` is raised in all of them after that step instead.

        >>> for batch in loader:  # doctest: +SKIP
        ...     ...
        ...     optimizer.step()
        ...     if accelerator.stop_requested:
        ...         break
        """
        asks = current_asks()
        asks.looks = True
        return asks.stopping

    @property
    def _models(self) -> list[Any]:
        return self.bundle.models

    @property
    def _optimizers(self) -> list[Any]:
        return self.bundle.optimizers

    @property
    def _schedulers(self) -> list[Any]:
        return self.bundle.schedulers

    @property
    def _dataloaders(self) -> list[Any]:
        return self.bundle.loaders

    @property
    def _custom_objects(self) -> list[Any]:
        return self.bundle.custom

    # Preparing

    def prepare(self, *args: Any, device_placement: list[bool | None] | None = None) -> Any:
        """
        The objects, ready for this run, in the order in which they were given.

        Models, optimizers, loaders and learning-rate schedules in any order and number; anything else comes back as it is,
        and so does what was prepared before.

        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # doctest: +SKIP
        """
        placements = [None] * len(args) if device_placement is None else device_placement
        if len(placements) != len(args):
            raise ConfigurationError(
                f"device_placement holds {len(placements)} values for {len(args)} objects. Give one for each."
            )
        objects = self.strategy.prepare(args)
        prepared = [self._prepare_one(each, placed) for each, placed in zip(objects, placements, strict=True)]
        # schedules look for their optimizer among those that are prepared by now
        prepared = [self.prepare_scheduler(each) if _is_scheduler(each) else each for each in prepared]
        return tuple(prepared) if len(prepared) != 1 else prepared[0]

    def _prepare_one(self, one: Any, placed: bool | None) -> Any:
        if isinstance(one, DataLoader):
            return self.prepare_data_loader(one, placed)
        if isinstance(one, Module):
            return self.prepare_model(one, placed)
        if isinstance(one, Optimizer):
            return self.prepare_optimizer(one, placed)
        return one

    def prepare_model(self, model: Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """The model on its device, computing in the chosen numbers, and, unless it is only evaluated, spread as the run is."""
        if is_prepared(model, self._kind_of_life):
            return add(self.bundle.models, model, self._kind_of_life)
        self.strategy.accept(model)
        model = self.precision.wrap_forward(extract_model_from_parallel(model) if is_prepared(model) else model)
        if self._places(device_placement):
            model = self.strategy.place(model)
        if not evaluation_mode:
            model = self.strategy.wrap_model(model)
        model = self.strategy.compile(model, self.compiling)
        return add(self.bundle.models, model, self._kind_of_life)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """The optimizer, stepping when gradients are synchronised."""
        if is_prepared(optimizer, self._kind_of_life):
            return add(self.bundle.optimizers, optimizer, self._kind_of_life)
        prepared = AcceleratedOptimizer(
            innermost(optimizer),
            self._places(device_placement),
            self.scaler,
            precision=self.precision,
            device=self.device,
            first_look=partial(look, self),
            strategy=self.strategy,
        )
        return add(self.bundle.optimizers, prepared, self._kind_of_life)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """The schedule, moving when its optimizer steps."""
        if is_prepared(scheduler, self._kind_of_life):
            return add(self.bundle.schedulers, scheduler, self._kind_of_life)
        scheduler = scheduler.scheduler if isinstance(scheduler, AcceleratedScheduler) else scheduler
        steered = getattr(scheduler, "optimizer", None)
        own = [each for each in self.bundle.optimizers if innermost(steered) is each.optimizer]
        prepared = AcceleratedScheduler(
            scheduler,
            own or self.bundle.optimizers,
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=self.split_batches,
            replicas=self.strategy.data_replicas[1],
        )
        return add(self.bundle.schedulers, prepared, self._kind_of_life)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """The loader, giving this process its part of each epoch."""
        if is_prepared(data_loader):
            return add(self.bundle.loaders, data_loader)
        rank, replicas = self.strategy.data_replicas
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=replicas,
            process_index=rank,
            split_batches=self.split_batches,
            put_on_device=self._places(device_placement),
            rng_types=list(self.rng_types),
            dispatch_batches=self.dispatch_batches,
            even_batches=self.even_batches,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        prepared.between = self.strategy.between_batches
        prepared.send = self.strategy.sender
        prepared.bar = len(self.bundle.loaders) if self._shows_epochs else None
        return add(self.bundle.loaders, prepared)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """The prepared loader without its first batches."""
        return skip_first_batches(dataloader, num_batches=num_batches)

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """The model as it was before `prepare`."""
        return self.strategy.unwrap(model, keep_fp32_wrapper=keep_fp32_wrapper, keep_torch_compile=keep_torch_compile)

    @property
    def _kind_of_life(self) -> str:
        """What a model is prepared for; in another world, or for other numbers, it is prepared anew."""
        return f"{self._life} {self.precision.name}"

    def _places(self, asked: bool | None) -> bool:
        return self.device_placement if asked is None else asked

    # Between processes

    def gather(self, tensor: T) -> T:
        """Every process's tensors, joined along dimension 0; nested in lists, tuples or mappings, on any device."""
        return collective.gather(tensor)  # type: ignore[no-any-return]  # as nested as it came

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """
        Every process's data, joined along dimension 0, without the samples that were repeated to even out the last batch.

        Tensors of shape `(batch, ...)` on any device, nested in lists, tuples or mappings, or lists of any objects; all
        processes must call it.

        >>> predictions, labels = accelerator.gather_for_metrics((predictions, labels))  # doctest: +SKIP
        """
        return gather_for_metrics(input_data, self.gradient_state, as_objects=use_gather_object)

    def reduce(self, tensor: T, reduction: str = "sum", scale: float = 1.0) -> T:
        """The sum or mean of every process's tensors, on all of them."""
        return collective.reduce(tensor, reduction, scale)  # type: ignore[no-any-return]  # as nested as it came

    def pad_across_processes(self, tensor: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> T:
        """The tensors, padded along `dim` to the longest of all processes."""
        return padding.pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)  # type: ignore[no-any-return]  # as nested as it came

    def set_trigger(self) -> None:
        """Raise a flag that `check_trigger` sees on every process."""
        self.flag_tensor = torch.tensor(1, device=self.device)

    def check_trigger(self) -> bool:
        """Whether some process raised the flag, which is then taken down; all processes must call it."""
        raised = collective.is_anywhere(self.flag_tensor is not None)
        if raised:
            self.flag_tensor = None
        return raised

    # Ending

    def free_memory(self, *objects: Any) -> list[None]:
        """Let go of everything that was prepared; returns a `None` for each of `objects`, to be put in its place."""
        count = len(objects)
        del objects
        self.strategy.release()
        self.bundle.clear()
        self.step = 0
        return release_memory(*[None] * count)

    def clear(self, *objects: Any) -> list[None]:
        """The same as `free_memory`."""
        return self.free_memory(*objects)

    def end_training(self) -> None:
        """The training is over: trackers keep what they were told, and the next `Accelerator` of this process begins anew."""
        try:
            self.world.tell_rest()
            self._finish_trackers()
            self.wait_for_checkpoint()
        finally:
            self.strategy.close()
            if self.world.backend is not None or current.is_joined():
                current.forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        return self  # the copies of an object that refers to it (a Trainer) belong to the same process

    def __reduce__(self) -> tuple[Any, ...]:
        # what is pickled for other objects of this process (a Trainer, a loader) refers to this one when it is loaded
        return stays(self)


def _by_class(handlers: Sequence[Any]) -> dict[type, Any]:
    found: dict[type, Any] = {}
    for handler in handlers:
        if not isinstance(handler, KwargsHandler):
            known = ", ".join(each.__name__ for each in _HANDLERS)
            raise ConfigurationError(f"Unsupported kwargs handler passed: {handler!r}. Known ones are {known}.")
        if type(handler) in found:
            raise ConfigurationError(f"You can only pass one {type(handler).__name__} in `kwargs_handlers`.")
        if not isinstance(handler, _HANDLERS):
            raise NotYetError(f"A {type(handler).__name__} in kwargs_handlers is not offered here yet. Leave it out.")
        found[type(handler)] = handler
    return found


def _pick(handlers: Mapping[type, Any], kind: type[H]) -> H | None:
    return next((handler for handler in handlers.values() if isinstance(handler, kind)), None)


def _accumulation(plugin: GradientAccumulationPlugin | None, steps: int, asked: Asked) -> GradientAccumulationPlugin:
    if plugin is None:
        return GradientAccumulationPlugin(
            num_steps=steps if asked.accumulation_steps is None else asked.accumulation_steps
        )
    if steps != 1:
        raise ConfigurationError(
            "You can only pass one of `gradient_accumulation_steps` and `gradient_accumulation_plugin`. "
            f"Both were given: {steps} and {plugin}."
        )
    return plugin


def _loading(config: DataLoaderConfiguration | None, split_batches: bool | None) -> DataLoaderConfiguration:
    config = config or DataLoaderConfiguration()
    return config if split_batches is None else replace(config, split_batches=split_batches)


def _is_scheduler(one: Any) -> bool:
    return isinstance(one, (LRScheduler, AcceleratedScheduler))
