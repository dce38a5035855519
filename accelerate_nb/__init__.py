"""Distributed PyTorch that feels like a notebook cell: the public names, loaded when they are first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

# The public names of each module. Importing this package imports none of them: torch comes with the first that needs it.
_NAMES: dict[str, tuple[str, ...]] = {
    "notebook.api": ("notebook_launcher", "debug_launcher", "launch"),
    "launching.run": ("Run",),
    "notebook.runs": ("attach", "runs"),
    "notebook.picker.form": ("config_picker",),
    "notebook.extension": ("load_ipython_extension", "unload_ipython_extension"),
    "runtime.accelerator.accelerator": ("Accelerator",),
    "runtime.world.state": ("PartialState",),
    "runtime.strategies.base": ("Strategy",),
    "runtime.strategies.ddp": ("DDP",),
    "runtime.data.prepared_loader": ("skip_first_batches",),
    "runtime.compat.dataclasses": (
        "AutocastKwargs", "DDPCommunicationHookType", "DataLoaderConfiguration", "DistributedDataParallelKwargs",
        "DistributedType", "GradScalerKwargs", "InitProcessGroupKwargs",
    ),
    "runtime.observability.profiling": ("ProfileKwargs",),
    "runtime.strategies.deepspeed.plugin": ("DeepSpeedPlugin",),
    "runtime.strategies.fsdp.plugin": ("FullyShardedDataParallelPlugin",),
    "runtime.parallelism_config": ("ParallelismConfig",),
    "runtime.strategies.pipeline.strategy": ("prepare_pippy",),
    "runtime.compat.packages": ("is_rich_available",),
    "runtime.training.memory": ("find_executable_batch_size",),
    "runtime.training.seed": ("synchronize_rng_states",),
    "big_models.empty": ("init_empty_weights", "init_on_device"),
    "big_models.device_map": ("infer_auto_device_map",),
    "big_models.load_checkpoint": ("load_checkpoint_in_model", "load_checkpoint_and_dispatch"),
    "big_models.dispatch": ("cpu_offload", "disk_offload", "dispatch_model"),
    "big_models.offload_hooks": ("cpu_offload_with_hook",),
    "errors": (
        "AccelerateNbError", "ConfigurationError", "LaunchError", "PayloadError", "WorkerError", "HangError",
        "StoppedError", "StopRequested",
    ),
}  # fmt: skip
_HOMES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604 - the names of one table


# The modules that `import accelerate` offers as attributes, loaded when they are first used.
_MODULES = (
    "accelerator", "big_modeling", "checkpointing", "commands", "data_loader", "hooks", "inference", "launchers",
    "local_sgd", "logging", "memory_utils", "optimizer", "parallelism_config", "scheduler", "state", "tracking",
    "utils",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})


if TYPE_CHECKING:
    from accelerate_nb.big_models.device_map import infer_auto_device_map as infer_auto_device_map
    from accelerate_nb.big_models.dispatch import (
        cpu_offload as cpu_offload,
        disk_offload as disk_offload,
        dispatch_model as dispatch_model,
    )
    from accelerate_nb.big_models.empty import (
        init_empty_weights as init_empty_weights,
        init_on_device as init_on_device,
    )
    from accelerate_nb.big_models.load_checkpoint import (
        load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
        load_checkpoint_in_model as load_checkpoint_in_model,
    )
    from accelerate_nb.big_models.offload_hooks import cpu_offload_with_hook as cpu_offload_with_hook
    from accelerate_nb.errors import (
        AccelerateNbError as AccelerateNbError,
        ConfigurationError as ConfigurationError,
        HangError as HangError,
        LaunchError as LaunchError,
        PayloadError as PayloadError,
        StoppedError as StoppedError,
        StopRequested as StopRequested,
        WorkerError as WorkerError,
    )
    from accelerate_nb.launching.run import Run as Run
    from accelerate_nb.notebook.api import (
        debug_launcher as debug_launcher,
        launch as launch,
        notebook_launcher as notebook_launcher,
    )
    from accelerate_nb.notebook.extension import (
        load_ipython_extension as load_ipython_extension,
        unload_ipython_extension as unload_ipython_extension,
    )
    from accelerate_nb.notebook.picker.form import config_picker as config_picker
    from accelerate_nb.notebook.runs import attach as attach, runs as runs
    from accelerate_nb.runtime.accelerator.accelerator import Accelerator as Accelerator
    from accelerate_nb.runtime.compat.dataclasses import (
        AutocastKwargs as AutocastKwargs,
        DataLoaderConfiguration as DataLoaderConfiguration,
        DDPCommunicationHookType as DDPCommunicationHookType,
        DistributedDataParallelKwargs as DistributedDataParallelKwargs,
        DistributedType as DistributedType,
        GradScalerKwargs as GradScalerKwargs,
        InitProcessGroupKwargs as InitProcessGroupKwargs,
    )
    from accelerate_nb.runtime.compat.packages import is_rich_available as is_rich_available
    from accelerate_nb.runtime.data.prepared_loader import skip_first_batches as skip_first_batches
    from accelerate_nb.runtime.observability.profiling import ProfileKwargs as ProfileKwargs
    from accelerate_nb.runtime.parallelism_config import ParallelismConfig as ParallelismConfig
    from accelerate_nb.runtime.strategies.base import Strategy as Strategy
    from accelerate_nb.runtime.strategies.ddp import DDP as DDP
    from accelerate_nb.runtime.strategies.deepspeed.plugin import DeepSpeedPlugin as DeepSpeedPlugin
    from accelerate_nb.runtime.strategies.fsdp.plugin import (
        FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
    )
    from accelerate_nb.runtime.strategies.pipeline.strategy import prepare_pippy as prepare_pippy
    from accelerate_nb.runtime.training.memory import find_executable_batch_size as find_executable_batch_size
    from accelerate_nb.runtime.training.seed import synchronize_rng_states as synchronize_rng_states
    from accelerate_nb.runtime.world.state import PartialState as PartialState
