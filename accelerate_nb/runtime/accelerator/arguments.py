"""The arguments of an `Accelerator` with the variables that a launcher sets, as what is built of them; nothing is joined for it."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from accelerate_nb.errors import ConfigurationError, NotYetError
from accelerate_nb.runtime.compat.env_vars import LauncherSettings
from accelerate_nb.runtime.compat.kwargs_handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProjectConfiguration,
)
from accelerate_nb.runtime.observability.profiling import ProfileKwargs
from accelerate_nb.runtime.parallelism_config import ParallelismConfig, TorchTensorParallelPlugin
from accelerate_nb.runtime.precision.base import precision_name
from accelerate_nb.runtime.precision.fp8_ao import AORecipeKwargs
from accelerate_nb.runtime.precision.fp8_recipes import MSAMPRecipeKwargs, TERecipeKwargs
from accelerate_nb.runtime.precision.registry import PrecisionOptions, choose_recipe
from accelerate_nb.runtime.strategies.fsdp.plugin import FullyShardedDataParallelPlugin
from accelerate_nb.runtime.strategies.megatron.plugin import MegatronLMPlugin
from accelerate_nb.runtime.strategies.registry import StrategyRequest

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
)


@dataclass(frozen=True, slots=True)
class TrainingRequest:
    """The precision of a training, with its options, and the way in which it is spread over processes, before these are joined."""

    precision: str
    precision_options: PrecisionOptions
    strategy: StrategyRequest
    # whether a launcher requests DeepSpeed, whose plugin is this process's first one
    launches_deepspeed: bool


def resolve_training(
    launcher: LauncherSettings,
    handlers: Mapping[type, KwargsHandler],
    mixed_precision: Any,
    strategy: Any,
    parallelism: ParallelismConfig | None,
    tensor_parallel: TorchTensorParallelPlugin | None,
    fsdp: FullyShardedDataParallelPlugin | None,
    megatron: MegatronLMPlugin | None,
) -> TrainingRequest:
    """What these arguments request of a training, and, where they are `None`, what the launcher does."""
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
    return TrainingRequest(
        precision,
        PrecisionOptions(handler_of(handlers, AutocastKwargs), handler_of(handlers, GradScalerKwargs), recipe),
        StrategyRequest(
            strategy, parallelism, handler_of(handlers, DistributedDataParallelKwargs), fsdp, megatron=megatron
        ),
        launches_deepspeed=launcher.use_deepspeed and strategy is None,
    )


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
        return GradientAccumulationPlugin(
            num_steps=steps if launcher.accumulation_steps is None else launcher.accumulation_steps
        )
    if steps != 1:
        raise ConfigurationError(
            "You can only pass one of `gradient_accumulation_steps` and `gradient_accumulation_plugin`. "
            f"Both were given: {steps} and {plugin}."
        )
    return plugin


def resolve_loaders(
    configuration: DataLoaderConfiguration | None, split_batches: bool | None
) -> DataLoaderConfiguration:
    """The configuration of loaders, with `split_batches` where that was given beside it."""
    found = configuration or DataLoaderConfiguration()
    return found if split_batches is None else replace(found, split_batches=split_batches)


def resolve_project(
    configuration: ProjectConfiguration | None, folder: str | os.PathLike[str] | None
) -> ProjectConfiguration:
    """The configuration of the project, which gets `folder` where it has none."""
    found = configuration or ProjectConfiguration()
    if folder is not None and found.project_dir is None:
        found.set_directories(os.fspath(folder))
    return found
