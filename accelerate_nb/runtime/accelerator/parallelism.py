"""Methods for a model that is spread over processes."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.nn import Module

from accelerate_nb.errors import NotConfiguredError, StateError
from accelerate_nb.events.model import MeshCoordinates
from accelerate_nb.rank.event_sink import emit
from accelerate_nb.runtime.data.prepared_loader import cut_for_group
from accelerate_nb.runtime.strategies.base import Strategy
from accelerate_nb.runtime.strategies.device_placement import devices_of
from accelerate_nb.runtime.world.accelerator_state import AcceleratorState
from accelerate_nb.runtime.world.mesh import DATA_AXES
from accelerate_nb.runtime.world.state import ProcessMethods


class ParallelismMethods(ProcessMethods):
    """The methods of an `Accelerator` for models that are split into parts."""

    state: AcceleratorState
    strategy: Strategy

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
        return cut_for_group(dl, self.strategy.batch_cutter, self.strategy.mesh.sp, self.device)

    def verify_device_map(self, model: Module) -> bool:
        """Whether a model, or a part of it, was loaded with its weights on several devices."""
        return any(len(devices_of(module)) > 1 for module in model.modules())

    def _report_coordinates(self) -> None:
        """Have the panel say this process's place in a mesh of several axes, or of one along which batches are the same."""
        world = self.strategy.world
        coordinates = dict(world.mesh.coordinates(world.rank))
        if len(coordinates) > 1 or not set(coordinates) <= set(DATA_AXES):
            emit(MeshCoordinates(world.rank, coordinates, time.time()))

    def _part_along(self, axis: str, part: str, error: type[StateError] = StateError) -> int:
        if self.parallelism_config is None:
            raise error(f"{part} is not configured. Give the Accelerator a `parallelism_config` first.")
        mesh = self.torch_device_mesh
        return int(mesh.get_local_rank(axis)) if axis in (mesh.mesh_dim_names or ()) else 0
