"""The strategy that splits layers along their width, so that each process computes a part of every layer."""

from __future__ import annotations

from torch.distributed.device_mesh import init_device_mesh
from torch.nn import Module

from accelerate_nb.runtime.parallelism_config import ParallelismConfig
from accelerate_nb.runtime.strategies.initial_weights import InitialWeights
from accelerate_nb.runtime.strategies.prepare_request import PrepareRequest
from accelerate_nb.runtime.strategies.sharded import ShardedStrategy
from accelerate_nb.runtime.strategies.tensor_parallel.split_layers import LayerSplitter
from accelerate_nb.runtime.world.world import World


class TensorParallel(ShardedStrategy):
    """Every process has a part of the width of each layer that a plan names, and all see the same batches."""

    axes = ("tp",)

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._splitter = LayerSplitter()

    def use_parallelism(self, config: ParallelismConfig) -> None:
        """Split layers along the configuration's mesh, by its plan or the model's own."""
        super().use_parallelism(config)
        self._splitter = LayerSplitter(config.tp_handler)

    def prepare_model(self, request: PrepareRequest) -> Module:
        """The model with split layers, and the first process's weights on all."""
        model: Module = request.value
        self.accept(model)
        model = self.precision.wrap_forward(model)
        weights = InitialWeights(self.world, getattr(model, "_init_weights", None))
        if self.world.size > 1:
            if self.device_mesh is None:
                self.device_mesh = init_device_mesh(self.world.device.type, (self.world.size,), mesh_dim_names=("tp",))
            self._splitter.split(model, self.device_mesh["tp"], weights)
        weights.bring(model)
        return self.compile(model, request.compiling)

    def close(self) -> None:
        """The training is over."""
        super().close()
        self._splitter.close()
