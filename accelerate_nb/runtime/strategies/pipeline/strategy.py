"""The strategy that gives each process some consecutive layers of the model: a pipeline of stages."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn import Module, Parameter

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.compat.enums import DistributedType
from accelerate_nb.runtime.operations import sharded_tensors
from accelerate_nb.runtime.parallelism_config import ParallelismConfig, TorchPipelineParallelConfig
from accelerate_nb.runtime.precision.base import MixedLayoutGradScaler, Precision
from accelerate_nb.runtime.precision.registry import PrecisionOptions
from accelerate_nb.runtime.strategies.base import Inputs, LossOf, PrepareRequest
from accelerate_nb.runtime.strategies.fsdp.plugin import FullyShardedDataParallelPlugin
from accelerate_nb.runtime.strategies.fsdp.strategy import FSDP
from accelerate_nb.runtime.strategies.fsdp.wrapping import shared_weights
from accelerate_nb.runtime.strategies.pipeline.pipelined_model import (
    PipelinedModel,
    Schedule,
    SharedGradients,
    StageRanks,
    groups_of_stages,
)
from accelerate_nb.runtime.strategies.pipeline.stage_plan import Layer, plan_stages, shared_by_stages
from accelerate_nb.runtime.strategies.pipeline.staged_model import Stage, StagedModel, move_weights
from accelerate_nb.runtime.strategies.sharded import InitialWeights, ShardedStrategy
from accelerate_nb.runtime.training.compile import compile_layers
from accelerate_nb.runtime.training.repoint import named_weights, original_name
from accelerate_nb.runtime.world.mesh import DATA_AXES
from accelerate_nb.runtime.world.registry import along
from accelerate_nb.runtime.world.world import World


class PipelineParallel(ShardedStrategy):
    """Every process has a stage of consecutive layers; `train_step` trains in a schedule of torch's, other axes shard or copy stages."""

    axes = ("pp", "dp_shard", "dp_replicate")

    def __init__(self, world: World, plugin: FullyShardedDataParallelPlugin | None = None) -> None:
        super().__init__(world)
        self._handler = TorchPipelineParallelConfig()
        self._requested_plugin = plugin
        self._fsdp: FSDP | None = None
        self._models: list[PipelinedModel] = []

    @property
    def distributed_type(self) -> DistributedType:
        """FSDP where weights are sharded."""
        return super().distributed_type if self._fsdp is None else self._fsdp.distributed_type

    def use_parallelism(self, config: ParallelismConfig) -> None:
        """Cut models as the configuration says."""
        super().use_parallelism(config)
        self._handler = config.pp_handler or self._handler

    def choose_precision(self, name: str, options: PrecisionOptions) -> Precision:
        """The precision, in which an overflow on one stage is known to all."""
        found = super().choose_precision(name, options)
        if isinstance(found.scaler, MixedLayoutGradScaler):
            found.scaler.share_overflow = self._share_overflow
        self._fsdp = self._sharding()
        return found

    def _sharding(self) -> FSDP | None:
        """What shards the stages; `None` where there is one pipeline."""
        if len(self.world.mesh.data_ranks(self.world.rank)) > 1:
            found = FSDP(self.world, self._requested_plugin)
            if not found.writes_parts:
                raise ConfigurationError(
                    "state_dict_type='FULL_STATE_DICT' was requested, but a pipeline's checkpoints are in parts, of which any number "
                    "of processes loads its own. Leave it out; `accelerate-nb merge-weights` and `save_model` write complete weights."
                )
            found.precision, found.device_mesh = self.precision, self.device_mesh
            self.is_fsdp2, self.fsdp_plugin = True, found.fsdp_plugin
            return found
        if self._requested_plugin is not None:
            raise ConfigurationError(
                f"FSDP was requested on {self.world.mesh}. Beside pp it shards along dp_shard: pass "
                "ParallelismConfig(dp_shard_size=..., pp_size=...), or leave the plugin out."
            )
        return None

    def _share_overflow(self, overflow: Tensor) -> None:
        dist.all_reduce(overflow, dist.ReduceOp.MAX, group=along("pp").group)

    # Preparing

    def prepare_model(self, request: PrepareRequest) -> Module:
        """The model with this process's stages of it, and the first process's weights in them."""
        model: Module = request.value
        if self.world.mesh.pp == 1:
            return super().prepare_model(request)
        self.accept(model)
        options = {} if self._fsdp is None else self._fsdp.shard_options(model)
        model = self.precision.wrap_forward(model)
        blocks = [] if self._fsdp is None else self._fsdp.blocks(model)
        schedule = Schedule(self._handler.schedule, self.world.mesh.pp)
        ranks = schedule.stage_ranks
        layers = plan_stages(model, len(ranks), self._handler.split_points, self._handler.example_inputs)
        pipeline = along("pp")
        in_world = self.world.mesh.ranks_along(self.world.rank, "pp")
        own = [stage for stage, rank in enumerate(ranks) if rank == pipeline.rank]
        held_by_several = shared_by_stages(layers, model)
        shared = self._shared(model, held_by_several, ranks, pipeline)
        staged = StagedModel(model, layers, self.world.device)
        staged.held = own
        weights = InitialWeights(
            self.world,
            getattr(model, "_init_weights", None) if self._fsdp is None else self._fsdp.initialise(model),
            held_by_several if self._fsdp is None else {*held_by_several, *self._fsdp.ignored(model)},
        )
        self._bring(model, layers, own, weights, partial(self._shard, blocks, options, weights))
        stages = {index: Stage(staged, index) for index in own}
        for stage in stages.values():
            self._shard([stage], options, weights, stage)
        compile_layers([layer.module for layer in layers if layer.stage in own], request.compiling)
        found = PipelinedModel(
            staged,
            stages,
            StageRanks(self.world.device, pipeline.group, [in_world[rank] for rank in ranks]),
            schedule,
            self._handler.num_microbatches or self.world.mesh.pp,
            shared,
        )
        self._models.append(found)
        return found

    def _shard(
        self, parts: Collection[Module], options: dict[str, Any], weights: InitialWeights, module: Module
    ) -> None:
        """Shard those of a module's parts that are named; their weights have been brought."""
        if self._fsdp is None:
            return
        inside = {id(part) for part in module.modules()}
        for part in parts:
            if id(part) in inside:
                fully_shard(
                    part,
                    reshard_after_forward=self._fsdp.fsdp_plugin.reshard_after_forward,
                    ignored_params=weights.ignored,
                    **options,
                )

    def _shared(
        self, model: Module, shared: Mapping[Parameter, Collection[int]], ranks: list[int], pipeline: World
    ) -> SharedGradients:
        """The gradients of the weights that several stages have, each by one of its names."""
        names: dict[Parameter, str] = {}
        for name, weight in named_weights(model).items():
            if weight in shared:
                names.setdefault(weight, name)
        holders = {name: [ranks[stage] for stage in shared[weight]] for weight, name in names.items()}
        counted = [name for name, held in holders.items() if min(held) == pipeline.rank]
        return SharedGradients(
            model, names.values(), groups_of_stages(self.world, pipeline, holders), counted, along(DATA_AXES)
        )

    def _bring(
        self,
        model: Module,
        layers: list[Layer],
        own: Collection[int],
        weights: InitialWeights,
        shard: Callable[[Module], None],
    ) -> None:
        """Bring the first process's weights into this process's layers, a layer at a time, and give up those of others."""
        shared = shared_weights(model)
        later = []

        def settle(layer: Layer, kept: Collection[int]) -> None:
            if layer.stage in own:
                shard(layer.module)
            else:
                move_weights(layer.module.modules(), "meta", kept)

        for layer in layers:
            if any(id(weight) in shared for weight in layer.module.parameters()):
                later.append(layer)
            else:
                weights.bring(layer.module)
                settle(layer, ())
        # what shares a weight is brought by one call, and shares it still
        weights.bring(model)
        kept = {id(weight) for layer in later if layer.stage in own for weight in layer.module.parameters()}
        for layer in later:
            settle(layer, kept)

    # A step

    def train_step(
        self, model: Module, inputs: Inputs, targets: Any, loss_of: LossOf, *, steps: int = 1, is_boundary: bool = True
    ) -> Tensor:
        """Forward, loss and backward of a batch, its parts in the order of the schedule."""
        if not isinstance(model, PipelinedModel):
            return super().train_step(model, inputs, targets, loss_of, steps=steps, is_boundary=is_boundary)
        if self.precision.scaler is not None and model.staged.count - 1 not in model.stages:
            # a scaler begins with the first loss, which other stages than the last do not see
            self.precision.scale(torch.zeros((), device=self.world.device))
        return model.train_step(inputs, targets, loss_of, lambda loss: self.precision.scale(loss / steps))

    def gradient_norm(self, weights: Sequence[Tensor], norm_type: float) -> Tensor:
        """The norm of all stages' gradients together, on all processes."""
        uncounted = set().union(*(model.shared.uncounted for model in self._models))
        norm = super().gradient_norm([weight for weight in weights if id(weight) not in uncounted], norm_type)
        if self.world.mesh.pp == 1:
            return norm
        largest = norm_type == float("inf")
        total = norm if largest else norm**norm_type
        dist.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=along("pp").group)
        return total if largest else total ** (1 / norm_type)

    # Weights

    def model_state(self, model: Module, *, unwrap: bool = True) -> dict[str, Any]:
        """The complete weights, on the CPU of each machine's first process, and an empty dictionary on the others."""
        if not isinstance(model, PipelinedModel):
            return super().model_state(model, unwrap=unwrap)
        state: dict[str, Any] = {}
        stages = model.staged.stage_of_names()
        for name, value in self.unwrap(model).state_dict().items():
            complete = value
            if isinstance(value, Tensor):
                complete = value if value.is_meta else sharded_tensors.whole(value)
                if name in stages:
                    if complete.is_meta:
                        complete = complete.new_empty(complete.shape, device=self.world.device)
                    complete = complete.detach().clone(memory_format=torch.contiguous_format)
                    model.ranks.broadcast(complete, stages[name])
                complete = complete.cpu() if self.world.is_local_main else complete
            if self.world.is_local_main:
                state[original_name(name)] = complete
        return state

    def release(self) -> None:
        """Release what was prepared."""
        super().release()
        self._models.clear()
