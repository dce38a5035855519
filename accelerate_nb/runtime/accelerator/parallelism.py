"""The verbs of a model that is split over processes, which none is yet."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

from torch import Tensor
from torch.nn import Module

from accelerate_nb.errors import NotYetError, StateError
from accelerate_nb.runtime.process import AcceleratorState, Process
from accelerate_nb.runtime.strategies.places import devices_of


class Splitting(Process):
    """What an `Accelerator` knows of the parts into which a model is split."""

    state: AcceleratorState

    @property
    def is_fsdp2(self) -> bool:
        """Whether weights are sharded, by the second version of FSDP."""
        return self.state.is_fsdp2

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether ways to split a model can be combined."""
        return self.is_fsdp2

    @property
    def parallelism_config(self) -> Any:
        """How the model is split; `None` where every process has all of it."""
        return self.state.parallelism_config

    @property
    def deepspeed_plugin(self) -> Any:
        """How DeepSpeed trains; `None` without DeepSpeed."""
        return self.state.deepspeed_plugin

    @property
    def torch_device_mesh(self) -> Any:
        """The mesh of processes over which the model is split; `None` where it isn't."""
        return self.state.device_mesh

    @property
    def tensor_parallel_rank(self) -> int:
        """Which part of each layer's width this process has; `StateError` where the model isn't split."""
        return self._part_along("tp", "Tensor parallelism")

    @property
    def data_parallel_rank(self) -> int:
        """Which copy of the model this process belongs to; `StateError` where the model isn't split."""
        return self._part_along("dp_replicate", "Data parallelism in a mesh")

    @property
    def data_parallel_shard_rank(self) -> int:
        """Which shard of the model this process has; `StateError` where the model isn't split."""
        return self._part_along("dp_shard", "Sharded data parallelism")

    @property
    def pipeline_parallel_rank(self) -> NoReturn:
        """Which of the model's layers this process has; `NotYetError`, as in Accelerate."""
        raise NotYetError(
            "Pipelines of processes are not offered here yet, nor by Accelerate. Don't ask for a rank in one."
        )

    @property
    def context_parallel_rank(self) -> NoReturn:
        """Which part of the sequence this process has; `NotYetError`, as in Accelerate."""
        raise NotYetError("A rank along the sequence is not offered here yet, nor by Accelerate. Don't ask for it.")

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

    def _part_along(self, axis: str, what: str) -> int:
        if self.parallelism_config is None:
            raise StateError(f"{what} is not configured. Give the Accelerator a `parallelism_config` first.")
        mesh = self.torch_device_mesh
        return int(mesh.get_local_rank(axis)) if axis in (mesh.mesh_dim_names or ()) else 0
