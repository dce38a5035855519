"""The properties of an `Accelerator`: its world, its precision, its settings, and the objects that it has prepared."""

from __future__ import annotations

import os
from typing import Any

import torch

from accelerate_nb.rank.stop_request import current_stop_request
from accelerate_nb.runtime.accelerator.step import StepMethods
from accelerate_nb.runtime.compat.enums import DistributedType, FP8BackendType
from accelerate_nb.runtime.compat.env_vars import LauncherSettings
from accelerate_nb.runtime.compat.kwargs_handlers import ProjectConfiguration
from accelerate_nb.runtime.precision.registry import package_named
from accelerate_nb.runtime.world.world import World


class AcceleratorProperties(StepMethods):
    """The properties of an `Accelerator`."""

    project_configuration: ProjectConfiguration
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
        return current_stop_request().checked()

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
