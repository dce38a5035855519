"""Methods for a model that is spread over processes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

from torch import Tensor
from torch.nn import Module

from accelerate_nb.errors import NotYetError, StateError
from accelerate_nb.runtime.strategies.device_placement import devices_of
from accelerate_nb.runtime.world.accelerator_state import AcceleratorState
from accelerate_nb.runtime.world.state import ProcessMethods


class ParallelismMethods(ProcessMethods):
    """The methods of an `Accelerator` for models that are split into parts."""

    state: AcceleratorState

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
    def pipeline_parallel_rank(self) -> NoReturn:
        """The index of this process's layers of the model; `NotYetError`, as in Accelerate."""
        raise NotYetError(
            "Pipelines of processes are not offered here yet, nor by Accelerate. Don't read a rank in one."
        )

    @property
    def context_parallel_rank(self) -> NoReturn:
        """The index of this process's part of the sequence; `NotYetError`, as in Accelerate."""
        raise NotYetError("A rank along the sequence is not offered here yet, nor by Accelerate. Don't read it.")

    def maybe_context_parallel(
        self,
        buffers: list[Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """A block in which each process has its part of the sequences in `buffers`, where sequences are split; they aren't yet."""
        return nullcontext()

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """The loader, cutting sequences for DeepSpeed where they are split; they aren't yet."""
        return dl

    def verify_device_map(self, model: Module) -> bool:
        """Whether a model, or a part of it, was loaded with its weights on several devices."""
        return any(len(devices_of(module)) > 1 for module in model.modules())

    def _part_along(self, axis: str, part: str) -> int:
        if self.parallelism_config is None:
            raise StateError(f"{part} is not configured. Give the Accelerator a `parallelism_config` first.")
        mesh = self.torch_device_mesh
        return int(mesh.get_local_rank(axis)) if axis in (mesh.mesh_dim_names or ()) else 0
