"""The properties of an `Accelerator`: its world, its precision, its settings, and how a model is spread over processes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from accelerate_nb.errors import NotConfiguredError, StateError
from accelerate_nb.rank.step_hold import current_step_hold
from accelerate_nb.runtime.compat.dataclasses import (
    DataLoaderConfiguration,
    DistributedType,
    FP8BackendType,
    ProjectConfiguration,
)
from accelerate_nb.runtime.compat.env_vars import LauncherSettings
from accelerate_nb.runtime.data.prepared_loader import cut_for_group
from accelerate_nb.runtime.observability.step_metrics import StepMetrics
from accelerate_nb.runtime.precision.base import Precision
from accelerate_nb.runtime.precision.registry import package_named
from accelerate_nb.runtime.strategies.base import Strategy, devices_of
from accelerate_nb.runtime.training.accumulation import AccumulationWindows, GradientState
from accelerate_nb.runtime.training.prepared import PreparedObjects
from accelerate_nb.runtime.world.state import AcceleratorState, ProcessMethods
from accelerate_nb.runtime.world.world import World


def _assignable(name: str) -> property:
    """A property for a list of prepared objects, which code written for Accelerate may assign."""
    return property(
        attrgetter(f"bundle.{name}"), lambda accelerator, entries: setattr(accelerator.bundle, name, entries)
    )


class AcceleratorProperties(ProcessMethods):
    """The properties of an `Accelerator`, which all of its methods read."""

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

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        self.precision.scaler = scaler

    @property
    def fp8_backend(self) -> FP8BackendType:
        """The package that computes in 8-bit floats; "NO" where none does."""
        recipe = self._fp8_recipe
        return recipe.package if recipe else package_named(LauncherSettings.read(os.environ).fp8_package)

    # Accelerate's names: the recipes of other packages than torchao are refused, and its delay is Transformer Engine's
    fp8_recipe_handler = te_recipe_handler = msamp_recipe_handler = None
    delayed_fp8_autocast = False

    @property
    def ao_recipe_handler(self) -> Any:
        """The recipe of torchao's 8-bit floats; `None` in other precisions."""
        return self._fp8_recipe

    @property
    def has_fp8_handler(self) -> bool:
        """Whether there is a recipe of 8-bit floats."""
        return self._fp8_recipe is not None

    @property
    def fp8_enabled(self) -> bool:
        """Whether models compute in 8-bit floats."""
        return self.mixed_precision == "fp8"

    @property
    def has_lomo_optimizer(self) -> bool:
        """Whether some prepared optimizer updates weights in its own backward, as lomo-optim's do."""
        return bool(self.strategy.fused_optimizers)

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
    def deepspeed_config(self) -> dict[str, Any]:
        """DeepSpeed's configuration in force, of the plugin; an `AttributeError` without DeepSpeed."""
        return self.deepspeed_plugin.deepspeed_config  # type: ignore[no-any-return]  # the plugin's

    @property
    def deepspeed_engine_wrapped(self) -> Any:
        """DeepSpeed's first engine, wrapped; `None` before `prepare` has made one, an `AttributeError` without DeepSpeed."""
        return self.strategy.deepspeed_engine_wrapped  # type: ignore[attr-defined]  # that of DeepSpeed alone has it

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

    @contextmanager
    def maybe_context_parallel(
        self,
        buffers: list[Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[Tensor] | None = None,
    ) -> Iterator[None]:
        """
        A block in which `buffers` are this process's parts of themselves along the dimensions `buffer_seq_dims`, where sequences are cut.

        They are changed in place, and are whole again after it, but for `no_restore_buffers`. What comes from a prepared loader is a part
        already, and stays as it is.
        """
        context = self.strategy.context
        if context is None:
            yield
            return
        with context.cut_buffers(buffers or [], buffer_seq_dims or [], list(no_restore_buffers or ())):
            yield

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """
        The loader with sequences cut for a model, where DeepSpeed splits them and the loader was prepared in a call without the model.

        It gives a batch of each process that shares them, one after the other, as parts: `sp_size` times as many as the loader.
        Anything else comes back as it is.
        """
        return cut_for_group(dl, self.strategy.batch_cutter, self.world.mesh.sp, self.device)

    def verify_device_map(self, model: Module) -> bool:
        """Whether a model, or a part of it, was loaded with its weights on several devices."""
        return len(devices_of(model)) > 1

    def _part_along(self, axis: str, part: str, error: type[StateError] = StateError) -> int:
        if self.parallelism_config is None:
            raise error(f"{part} is not configured. Give the Accelerator a `parallelism_config` first.")
        mesh = self.torch_device_mesh
        return int(mesh.get_local_rank(axis)) if axis in (mesh.mesh_dim_names or ()) else 0

    # Accelerate's names for what was prepared
    _models = _assignable("models")
    _optimizers = _assignable("optimizers")
    _schedulers = _assignable("schedulers")
    _dataloaders = _assignable("loaders")
    _custom_objects = _assignable("custom")
