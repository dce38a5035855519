"""The `Accelerator`: it keeps what was prepared, and passes each call on to the module that implements it."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from itertools import count
from multiprocessing.context import get_spawning_popen
from typing import Any, NoReturn, TypeVar, get_args
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from accelerate_nb.config.options.megatron import MegatronLMPlugin
from accelerate_nb.errors import ConfigurationError, NotYetError, StateError
from accelerate_nb.events.event_types import MeshCoordinates, PrecisionChoice
from accelerate_nb.rank.event_sink import emit, outlet
from accelerate_nb.runtime.accelerator.checkpointing import CheckpointMethods
from accelerate_nb.runtime.accelerator.prepare import PrepareMethods
from accelerate_nb.runtime.accelerator.tracking import TrackingMethods
from accelerate_nb.runtime.checkpoints.saver import Saver
from accelerate_nb.runtime.compat.dataclasses import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DynamoBackend,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    PrecisionType,
    ProjectConfiguration,
    RNGType,
)
from accelerate_nb.runtime.compat.env_vars import LauncherSettings
from accelerate_nb.runtime.observability.phase_timer import PhaseTimer
from accelerate_nb.runtime.observability.profiling import ProfileKwargs
from accelerate_nb.runtime.observability.step_metrics import StepMetrics
from accelerate_nb.runtime.operations import collective
from accelerate_nb.runtime.parallelism_config import ParallelismConfig, TorchTensorParallelPlugin
from accelerate_nb.runtime.precision.base import precision_name
from accelerate_nb.runtime.precision.registry import PrecisionOptions, Recipe, choose_recipe
from accelerate_nb.runtime.strategies.base import Strategy
from accelerate_nb.runtime.strategies.deepspeed.plugin import DeepSpeedPlugin, choose_plugins
from accelerate_nb.runtime.strategies.fsdp.plugin import FullyShardedDataParallelPlugin
from accelerate_nb.runtime.strategies.registry import StrategyRequest, choose_strategy
from accelerate_nb.runtime.trackers.base import PanelTracker
from accelerate_nb.runtime.trackers.registry import filter_trackers
from accelerate_nb.runtime.training.accumulation import GradientState
from accelerate_nb.runtime.training.compile import TorchDynamoPlugin, choose_plugin
from accelerate_nb.runtime.training.memory import release_memory
from accelerate_nb.runtime.training.metrics import check_gather, gather_for_metrics
from accelerate_nb.runtime.training.prepared import PreparedObjects
from accelerate_nb.runtime.world import registry
from accelerate_nb.runtime.world.state import AcceleratorState, join
from accelerate_nb.runtime.world.world import DATA_AXES, Axis

T = TypeVar("T")
H = TypeVar("H", bound=KwargsHandler)
C = TypeVar("C", DataLoaderConfiguration, ProjectConfiguration)

_HANDLERS = (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    *get_args(Recipe),
)


class Accelerator(PrepareMethods, CheckpointMethods, TrackingMethods):
    """
    Turns a training loop for one process into a loop for many: same calls, same numbers.

    >>> accelerator = Accelerator()
    >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # doctest: +SKIP
    >>> accelerator.backward(loss)  # doctest: +SKIP
    """

    # of a result it is the part that can't be brought back
    belongs_to_process = True
    flag_tensor: Tensor | None = None

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: PrecisionType | str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: TorchTensorParallelPlugin | None = None,
        megatron_lm_plugin: MegatronLMPlugin | None = None,
        rng_types: list[str | RNGType] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[KwargsHandler] | None = None,
        dynamo_backend: DynamoBackend | str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None = None,
        parallelism_config: ParallelismConfig | None = None,
        *,
        strategy: Strategy | type[Strategy] | str | None = None,
    ) -> None:
        launcher = LauncherSettings.read(os.environ)
        handlers = handlers_by_class(kwargs_handlers or [])
        self.autocast_handler = handler_of(handlers, AutocastKwargs)
        self.ddp_handler = handler_of(handlers, DistributedDataParallelKwargs)
        self.scaler_handler = handler_of(handlers, GradScalerKwargs)
        self.init_handler = handler_of(handlers, InitProcessGroupKwargs)
        self.profile_handler = handler_of(handlers, ProfileKwargs)
        self.compiling = choose_plugin(dynamo_backend, dynamo_plugin)
        plugins = (parallelism_config, torch_tp_plugin, fsdp_plugin, megatron_lm_plugin)
        precision, options, spread = resolve_training(launcher, handlers, mixed_precision, strategy, *plugins)
        accumulation = resolve_accumulation(gradient_accumulation_plugin, gradient_accumulation_steps, launcher)
        self.dataloader_config = resolve_loaders(dataloader_config, split_batches)
        self.project_configuration = resolve_project(project_config, project_dir)
        self._join(cpu or launcher.cpu, precision)
        launches_deepspeed = launcher.use_deepspeed and strategy is None
        deepspeed = choose_plugins(deepspeed_plugin, deepspeed_plugins, self.state, launches_deepspeed)
        # not before what may be refused: all instances share it
        self.gradient_state = GradientState(accumulation)
        # a loop that was left in a window of accumulation has set it to False
        self.gradient_state.sync_gradients = True
        self._spread(precision, options, replace(spread, deepspeed=deepspeed))
        self.bundle, self._generation, self._saver = PreparedObjects(), registry.generation(), Saver(self._world)
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.rng_types = ["generator"] if rng_types is None else rng_types
        progress = self.dataloader_config.progress
        self._shows_epochs = launcher.loader_progress if progress is None else progress
        self.step = 0
        self.log_with = filter_trackers(log_with, self.logging_dir)
        self.panel = PanelTracker()
        self.step_metrics = self._step_metrics(launcher)
        self.trackers: list[Any] = []
        self._save_model_state_pre_hook: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self._load_model_state_pre_hook: OrderedDict[int, Callable[..., None]] = OrderedDict()

    def _join(self, cpu: bool, precision: str) -> None:
        """Join the world; its state gets the names of the precision and of the compiler."""
        registry.forget_ended()
        self._world = join(cpu=cpu, **({} if self.init_handler is None else self.init_handler.requested()))
        self.state = AcceleratorState(precision, cpu, self.compiling, _from_accelerator=True)
        if self.compiling.backend != DynamoBackend.NO and precision == "no" and self._world.device.type == "cuda":
            # as Accelerate does: float32 products on tensor cores, with 10 bits of mantissa
            torch.backends.cuda.matmul.allow_tf32 = True

    def _spread(self, precision: str, options: PrecisionOptions, request: StrategyRequest) -> None:
        """Choose the strategy and, in it, the precision; the state and the panel hear of both."""
        self.strategy = choose_strategy(self._world, request)
        self.state.strategy, self._world = self.strategy, self.strategy.world
        coordinates = dict(self._world.mesh.coordinates(self._world.rank))
        if len(coordinates) > 1 or not set(coordinates) <= set(DATA_AXES):  # in other meshes the rank says it all
            emit(MeshCoordinates(self._world.rank, coordinates, time.time()))
        self.precision = self.strategy.choose_precision(precision, options)
        self._fp8_recipe = options.recipe
        self.state._mixed_precision = self.precision.name
        emit(PrecisionChoice(self._world.rank, self.precision.name, time.time()))

    def _step_metrics(self, launcher: LauncherSettings) -> StepMetrics | None:
        """The measurement of steps, where somebody watches; the steps of XLA devices are computed later than they are made."""
        if outlet() is None or not launcher.autolog or self.device.type == "xla":
            return None
        replicas = self.strategy.data_replicas[1]
        rank, size = self._world.rank, self._world.size
        return StepMetrics(rank, self.device, replicas / size, PhaseTimer(rank, self.device, size))

    # Between processes

    def gather(self, tensor: T, *, axis: Axis = None) -> T:
        """
        Every process's tensors, joined along dimension 0; nested in lists, tuples or mappings, on any device.

        Samples that were repeated to even out a loader's last step are among them, with a warning; `gather_for_metrics` leaves them out.
        With an `axis` of the mesh, or several ("dp_replicate", "dp_shard", "tp", ...), the processes are those along it.
        """
        check_gather(tensor, self.gradient_state)
        return collective.gather(tensor, axis=axis)  # type: ignore[no-any-return]  # as nested as it came

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """
        Every process's data, joined along dimension 0, without the samples that were repeated to even out the last batch.

        Tensors of shape `(batch, ...)` on any device, nested in lists, tuples or mappings, or lists of any objects; all
        processes must call it.

        >>> predictions, labels = accelerator.gather_for_metrics((predictions, labels))  # doctest: +SKIP
        """
        return gather_for_metrics(input_data, self.gradient_state, as_objects=use_gather_object)

    def reduce(self, tensor: T, reduction: str = "sum", scale: float = 1.0, *, axis: Axis = None) -> T:
        """The sum or mean of every process's tensors, on all of them; `axis` is as in `gather`."""
        return collective.reduce(tensor, reduction, scale, axis=axis)  # type: ignore[no-any-return]  # as nested as it came

    def pad_across_processes(self, tensor: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> T:
        """The tensors, padded along `dim` to the longest of all processes."""
        return collective.pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)  # type: ignore[no-any-return]  # as nested as it came

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
        """Release everything that was prepared; returns a `None` for each of `objects`, to replace it."""
        count = len(objects)
        del objects
        self.strategy.release()
        self.bundle.clear()
        self.step = 0
        self.gradient_state.sync_gradients = True
        return release_memory(*[None] * count)

    def clear(self, *objects: Any) -> list[None]:
        """The same as `free_memory`."""
        return self.free_memory(*objects)

    def end_training(self) -> None:
        """
        The training is over: trackers keep what was logged, and the next `Accelerator` of this process begins a new one.

        Until then this one can still save, print and gather; models that were prepared on several processes don't go on.
        """
        try:
            self.world.report_deferred()
            self._finish_trackers()
            self.wait_for_checkpoint()
        finally:
            self.strategy.close()
            # a second call leaves the world of a newer Accelerator alone
            is_of_world = self._generation is registry.generation()
            if is_of_world and (self.world.backend is not None or registry.is_joined()):
                registry.end()

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        return self  # the copies of an object that refers to it (a Trainer) belong to the same process

    def __reduce__(self) -> tuple[Any, ...]:
        # what is pickled for other objects of this process (a Trainer, a loader) refers to this one when it is loaded
        return stays(self)


def resolve_training(
    launcher: LauncherSettings,
    handlers: Mapping[type, KwargsHandler],
    mixed_precision: Any,
    strategy: Any,
    parallelism: ParallelismConfig | None,
    tensor_parallel: TorchTensorParallelPlugin | None,
    fsdp: FullyShardedDataParallelPlugin | None,
    megatron: MegatronLMPlugin | None,
) -> tuple[str, PrecisionOptions, StrategyRequest]:
    """The precision that these arguments, or else the launcher, request, its options, and how the training is spread."""
    precision = precision_name(launcher.mixed_precision if mixed_precision is None else mixed_precision)
    recipe = choose_recipe(precision, handlers.values(), launcher.fp8_package)
    if parallelism is None and tensor_parallel is not None:
        parallelism = ParallelismConfig(tp_size=tensor_parallel.tp_size)
    elif parallelism is None and launcher.use_parallelism:
        parallelism = ParallelismConfig()
    if fsdp is None and launcher.use_fsdp and strategy is None:
        fsdp = FullyShardedDataParallelPlugin()
    if megatron is None and launcher.use_megatron_lm and strategy in (None, "megatron"):
        megatron = MegatronLMPlugin()
    options = PrecisionOptions(handler_of(handlers, AutocastKwargs), handler_of(handlers, GradScalerKwargs), recipe)
    ddp = handler_of(handlers, DistributedDataParallelKwargs)
    return precision, options, StrategyRequest(strategy, parallelism, ddp, fsdp, megatron=megatron)


def handlers_by_class(handlers: Sequence[Any]) -> dict[type, KwargsHandler]:
    """The handlers that were given, by their classes; an error names one that is not known, or is there twice."""
    found: dict[type, KwargsHandler] = {}
    for handler in handlers:
        if not isinstance(handler, KwargsHandler):
            known = ", ".join(item.__name__ for item in _HANDLERS)
            raise ConfigurationError(f"Unsupported kwargs handler passed: {handler!r}. Known ones are {known}.")
        if type(handler) in found:
            raise ConfigurationError(f"You can only pass one {type(handler).__name__} in `kwargs_handlers`.")
        if not isinstance(handler, _HANDLERS):
            raise NotYetError(f"A {type(handler).__name__} in kwargs_handlers is not offered here yet. Leave it out.")
        found[type(handler)] = handler
    return found


def handler_of(handlers: Mapping[type, KwargsHandler], handler_type: type[H]) -> H | None:
    """The handler of a class, or of one below it."""
    return next((handler for handler in handlers.values() if isinstance(handler, handler_type)), None)


def resolve_accumulation(
    plugin: GradientAccumulationPlugin | None, steps: int, launcher: LauncherSettings
) -> GradientAccumulationPlugin:
    """The accumulation of gradients: that of the plugin, else the launcher's number of steps, else `steps`."""
    if plugin is None:
        return GradientAccumulationPlugin(num_steps=_micro_steps(steps, launcher.accumulation_steps))
    if steps != 1:
        raise ConfigurationError(
            "You can only pass one of `gradient_accumulation_steps` and `gradient_accumulation_plugin`. "
            f"Both were given: {steps} and {plugin}."
        )
    return plugin


def _micro_steps(given: Any, launched: int | None) -> int:
    """The number of micro-steps in a step: the launcher's, else the one given, which may be a text or a float as in Accelerate."""
    with suppress(TypeError, ValueError):
        if (steps := int(given if launched is None else launched)) >= 1:
            return steps
    raise ConfigurationError(
        f"gradient_accumulation_steps={given!r} was given, and a whole number is needed. Pass one that is at least 1."
    )


def _settings_or_default(given: C | None, settings_type: type[C], argument: str) -> C:
    """The object of settings that was given, or one of defaults; an error for what lacks any of them, such as a dictionary."""
    found = settings_type() if given is None else given
    if not all(hasattr(found, setting.name) for setting in fields(settings_type)):
        name = settings_type.__name__
        raise ConfigurationError(
            f"{argument} should be a {name} of accelerate_nb.utils, but is {given!r:.200}. Pass {argument}={name}(...)."
        )
    return found


def resolve_loaders(
    configuration: DataLoaderConfiguration | None, split_batches: bool | None
) -> DataLoaderConfiguration:
    """The configuration of loaders, with `split_batches` where that was given beside it."""
    found = _settings_or_default(configuration, DataLoaderConfiguration, "dataloader_config")
    return found if split_batches is None else replace(found, split_batches=split_batches)


def resolve_project(
    configuration: ProjectConfiguration | None, folder: str | os.PathLike[str] | None
) -> ProjectConfiguration:
    """The configuration of the project, which gets `folder` where it has none."""
    found = _settings_or_default(configuration, ProjectConfiguration, "project_config")
    if folder is not None and found.project_dir is None:
        found.set_directories(os.fspath(folder))
    return found


# By process, which a fork changes, and number. It holds nothing alive.
_objects: WeakValueDictionary[tuple[int, int], Any] = WeakValueDictionary()
_numbers = count()


def stays(item: Any) -> tuple[Any, ...]:
    """
    The `__reduce__` of an object of this process, which loads as that object.

    Another process loads its own one of the same number, or raises `StateError`. What is pickled is the same in each run and on
    each rank: `datasets` makes of it the name under which it caches what a function returned.
    """
    # at once while something is pickled for another process: arguments of a launched function, of a `Process`, of a loader's workers
    if get_spawning_popen() is not None:
        _refuse(type(item).__name__)
    if not hasattr(item, "_pickled_as"):
        item._pickled_as = next(_numbers)
    _objects[os.getpid(), item._pickled_as] = item
    return _itself, (type(item).__name__, item._pickled_as)


def _itself(class_name: str, number: int) -> Any:
    item = _objects.get((os.getpid(), number))
    return _refuse(class_name) if item is None else item


def _refuse(class_name: str) -> NoReturn:
    raise StateError(
        f"An {class_name} can't travel: it belongs to the process in which it was made, for as long as it is in use there. "
        "Make it inside the function that is launched."
    )
