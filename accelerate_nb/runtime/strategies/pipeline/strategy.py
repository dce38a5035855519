"""The strategy that gives each process some consecutive layers: a pipeline of stages, trained in the order of a schedule of torch."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import Module, Parameter

from accelerate_nb.config.value_types import did_you_mean
from accelerate_nb.errors import ConfigurationError, DataError, StateError
from accelerate_nb.runtime.compat.dataclasses import DistributedType
from accelerate_nb.runtime.operations import sharded_tensors
from accelerate_nb.runtime.operations.collective import broadcast
from accelerate_nb.runtime.operations.nested import ignorant_find_batch_size, send_to_device
from accelerate_nb.runtime.parallelism_config import ParallelismConfig, TorchPipelineParallelConfig
from accelerate_nb.runtime.precision.base import MixedLayoutGradScaler, Precision
from accelerate_nb.runtime.precision.registry import PrecisionOptions
from accelerate_nb.runtime.strategies.base import Inputs, LossOf, PrepareRequest
from accelerate_nb.runtime.strategies.fsdp.plugin import FullyShardedDataParallelPlugin
from accelerate_nb.runtime.strategies.fsdp.strategy import FSDP
from accelerate_nb.runtime.strategies.pipeline.staged_model import (
    Layer,
    Stage,
    StagedModel,
    batch_size,
    merged,
    microbatches,
    move_weights,
    output_on_all,
    plan_stages,
    shared_by_stages,
)
from accelerate_nb.runtime.strategies.sharded import InitialWeights, ShardedStrategy, shared_weights
from accelerate_nb.runtime.training.compile import compile_layers
from accelerate_nb.runtime.training.repoint import named_weights, original_name
from accelerate_nb.runtime.training.unwrap import ModelWrapper
from accelerate_nb.runtime.world.registry import along, current_world
from accelerate_nb.runtime.world.state import PartialState
from accelerate_nb.runtime.world.world import DATA_AXES, World

# torch's names, of which those with several stages a process are the later ones.
NAMES = ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
_IN_A_V = (schedules.ScheduleZBVZeroBubble, schedules.ScheduleDualPipeV)


@dataclass(frozen=True)
class Schedule:
    """A schedule by torch's name, for so many processes."""

    name: str
    processes: int

    def __post_init__(self) -> None:
        if self.name.lower() not in map(str.lower, NAMES):
            raise ConfigurationError(
                f"The schedule {self.name!r} was requested for a pipeline. {did_you_mean(self.name, NAMES)} Known ones are "
                f"{', '.join(NAMES)}.".replace("  ", " ")
            )

    @property
    def schedule_class(self) -> Any:
        """Torch's class."""
        return schedules.get_schedule_class(self.name)

    @property
    def stage_ranks(self) -> list[int]:
        """For each stage the index of its process: around in a circle, or, for some schedules, there and back."""
        there = list(range(self.processes))
        if issubclass(self.schedule_class, schedules.PipelineScheduleSingle):
            return there
        return there + (there[::-1] if self.schedule_class in _IN_A_V else there)


class _Stage(PipelineStage):
    """A stage that connects to its neighbours when it first sends, but on CUDA devices, whose library wants that before."""

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        # torch 2.9 receives four bytes where it sends eight, which gloo refuses
        return super()._get_init_p2p_neighbors_ops() if self.device.type == "cuda" else []

    def _post_metadata_inference_cleanup(self) -> None:
        """Keep gradients: shapes were given, not tried, but torch 2.13 throws the gradients of a window away at the first step."""


class ScheduledRun:
    """torch's schedule over the stages of this process, for parts of certain shapes."""

    def __init__(
        self, schedule: Schedule, stages: Mapping[int, Stage], group: Any, device: torch.device, parts: Sequence[Inputs]
    ) -> None:
        self.stages, self.count = stages, len(parts)
        made = [self._stage(stage, group, device, parts[0]) for _, stage in sorted(stages.items())]
        schedule_class = schedule.schedule_class
        if schedule_class in _IN_A_V and not issubclass(schedule_class, schedules._PipelineScheduleRuntime):
            raise ConfigurationError(
                f"The schedule {schedule.name!r} was requested, but that of torch {torch.__version__} can't pass a tensor between two "
                "stages of one process. Take 'DualPipeV', or a later torch."
            )
        several = issubclass(schedule_class, schedules.PipelineScheduleMulti)
        try:
            self._schedule = schedule_class(
                made if several else made[0],
                n_microbatches=self.count,
                loss_fn=lambda output, _target: output.sum(),
                scale_grads=False,
            )
        except ValueError as error:
            raise ConfigurationError(
                f"The schedule {schedule.name!r} was requested for {len(schedule.stage_ranks)} stages and {self.count} parts of a batch, "
                f"but it can't be made: {error} Take another num_microbatches, or another schedule."
            ) from error

    def _stage(self, stage: Stage, group: Any, device: torch.device, part: Inputs) -> _Stage:
        staged = stage.staged
        received = [] if stage.index == 0 else staged.received_shape(stage.index, part).tensors
        is_last = stage.index == staged.count - 1
        # a last stage returns its loss
        sent = [torch.empty(1)] if is_last else staged.received_shape(stage.index + 1, part).tensors
        return _Stage(
            stage,
            stage.index,
            staged.count,
            device,
            input_args=tuple(_with_gradient(tensor) for tensor in received),
            output_args=tuple(_with_gradient(tensor) for tensor in sent),
            group=group,
        )

    def step(self, parts: Sequence[Inputs], loss_of_part: Callable[[Any, int], Tensor]) -> None:
        """Forward and backward of all parts."""

        def finish(output: Any, number: int) -> Tensor:
            # FSDP warns about a view that a module returns
            return loss_of_part(output, number).reshape(1).clone()

        for stage in self.stages.values():
            stage.parts, stage.finish = parts, finish
        try:
            self._schedule.step(number=torch.arange(self.count), target=torch.zeros(self.count, 1), losses=[])
        finally:
            for stage in self.stages.values():
                stage.parts, stage.finish = (), None


def _with_gradient(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.is_floating_point())


@dataclass(frozen=True, slots=True)
class StageRanks:
    """The processes of a pipeline: `ranks` has the rank of each stage's process in the world, and `group` is that of all of them."""

    device: torch.device
    group: Any
    ranks: Sequence[int]

    def forward(self, stages: Mapping[int, Stage], parts: Sequence[Inputs]) -> Any:
        """The whole batch's output, on the last stage's process, and `None` on others; nothing is kept for a backward."""
        rank, last = dist.get_rank(), len(self.ranks) - 1
        outputs: list[Any] = []
        sent: list[tuple[Any, Tensor]] = []
        handed_over: dict[tuple[int, int], Sequence[Tensor]] = {}
        for index, stage in sorted(stages.items()):
            stage.parts = parts
            for number, part in enumerate(parts):
                received = handed_over.pop((index, number), None)
                if received is None:
                    received = self._received(stage, part) if index else ()
                output = stage(*received, number=number)
                if index == last:
                    outputs.append(output)
                elif self.ranks[index + 1] == rank:
                    handed_over[index + 1, number] = output
                else:
                    sent += [(dist.isend(tensor, self.ranks[index + 1], group=self.group), tensor) for tensor in output]
            stage.parts = ()
        for work, _ in sent:
            work.wait()
        return merged(outputs, [batch_size(part) for part in parts]) if outputs else None

    def _received(self, stage: Stage, part: Inputs) -> list[Tensor]:
        shapes = stage.staged.received_shape(stage.index, part).tensors
        found = [torch.empty(shape.shape, dtype=shape.dtype, device=self.device) for shape in shapes]
        for tensor in found:
            dist.recv(tensor, self.ranks[stage.index - 1], group=self.group)
        return found

    def output_on_all(self, output: Any) -> Any:
        """The last stage's output on all processes."""
        return output_on_all(output, self.ranks[-1], self.group, self.device)

    def broadcast(self, tensor: Tensor, stage: int) -> None:
        """Fill a tensor with that of a stage's process."""
        dist.broadcast(tensor, self.ranks[stage], group=self.group)


class SharedGradients:
    """The weights that several stages have, with the groups that add their gradients up."""

    # a weight whose stages are all of this process has no group; `counted` are the names that this process's part of a norm counts

    def __init__(
        self, model: Module, names: Iterable[str], groups: Mapping[str, Any], counted: Iterable[str], pipelines: World
    ) -> None:
        self.model, self.names, self.groups, self.pipelines = model, sorted(names), groups, pipelines
        self._counted = set(counted)

    def _weights(self) -> list[tuple[str, Tensor]]:
        weights = named_weights(self.model)
        return [(name, weights[name]) for name in self.names if not weights[name].is_meta]

    @property
    def uncounted(self) -> set[int]:
        """The weights, by `id`, that another process counts."""
        return {id(weight) for name, weight in self._weights() if name not in self._counted}

    @contextmanager
    def added(self) -> Iterator[None]:
        """A block with a backward; the sums of its gradients over stages, averaged over pipelines, are added to what was there."""
        weights = [(name, weight) for name, weight in self._weights() if weight.requires_grad]
        before = [weight.grad for _, weight in weights]
        for _, weight in weights:
            weight.grad = None
        try:
            yield
        except BaseException:
            for (_, weight), earlier in zip(weights, before, strict=True):
                weight.grad = earlier
            raise
        for (name, weight), earlier in zip(weights, before, strict=True):
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            if name in self.groups:
                dist.all_reduce(weight.grad, group=self.groups[name])
            if self.pipelines.size > 1:
                dist.all_reduce(weight.grad, group=self.pipelines.group)
                weight.grad.div_(self.pipelines.size)
            if earlier is not None:
                weight.grad.add_(earlier)


def groups_of_stages(world: World, along: World, shared: Mapping[str, Iterable[int]]) -> dict[str, Any]:
    """For each shared weight the group of its processes, by their indices along the pipeline; all processes call it."""
    made: dict[tuple[int, ...], Any] = {}
    found: dict[str, Any] = {}
    pipelines = sorted({world.mesh.ranks_along(rank, "pp") for rank in range(world.size)})
    for name, indices in shared.items():
        held = sorted(set(indices))
        for pipeline in pipelines if 1 < len(held) < along.size else ():
            ranks = tuple(pipeline[index] for index in held)
            if ranks not in made:
                made[ranks] = dist.new_group(list(ranks))
        if len(held) > 1 and along.rank in held:
            own = tuple(world.mesh.ranks_along(world.rank, "pp")[index] for index in held)
            found[name] = made.get(own, along.group)
    return found


class PipelinedModel(ModelWrapper):
    """The model, whose layers are on several processes; all call it with the same batch, and get the same output, without gradients."""

    def __init__(
        self,
        staged: StagedModel,
        stages: Mapping[int, Stage],
        ranks: StageRanks,
        schedule: Schedule,
        count: int,
        shared: SharedGradients,
    ) -> None:
        super().__init__(staged.model)
        self.staged, self.stages, self.ranks = staged, stages, ranks
        self.schedule, self.count, self.shared = schedule, count, shared
        self._runs: dict[Any, ScheduledRun] = {}

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """The model's output for the whole batch, of any size, without gradients; `StateError` where a training loop calls it."""
        if self.training and torch.is_grad_enabled():
            raise StateError(
                "A model whose layers are in stages was called in a training loop, but its forward keeps nothing for a backward. "
                "Train it with `loss = accelerator.train_step(model, inputs, loss_fn=..., targets=...)`, which makes the forward, the loss "
                "and the backward of a batch in the order of the schedule; for its output alone call it in `torch.no_grad()`."
            )
        with torch.no_grad():
            output = self.ranks.forward(self.stages, microbatches((arguments, keywords), self.count))
            return self.ranks.output_on_all(output)

    def train_step(self, inputs: Inputs, targets: Any, loss_of: LossOf, scale: Callable[[Tensor], Tensor]) -> Tensor:
        """Forward and backward in the order of the schedule, of `scale(loss)`; the mean of the parts' losses, on all processes."""
        size = batch_size(inputs)
        if size % self.count:
            raise DataError(
                f"A batch of {size} samples was passed to a pipeline that cuts it in {self.count} equal parts. Take a batch size that "
                f"{self.count} divides (drop_last=True leaves a rest out), or another num_microbatches."
            )
        cut = microbatches((inputs, targets), self.count)
        parts = [part for part, _ in cut]
        losses: list[Tensor] = []

        def loss_of_part(output: Any, number: int) -> Tensor:
            loss = loss_of(output, cut[number][1])
            losses.append(loss.detach())
            return scale(loss) / self.count

        key = self.staged.key(parts[0])
        if key not in self._runs:
            self._runs = {key: ScheduledRun(self.schedule, self.stages, self.ranks.group, self.ranks.device, parts)}
        with self.shared.added():
            self._runs[key].step(parts, loss_of_part)
        # whatever torch's default type is
        empty = torch.zeros((), dtype=torch.float32, device=self.ranks.device)
        total = torch.stack(losses).mean().float() if losses else empty
        self.ranks.broadcast(total, self.staged.count - 1)
        return total


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


# Inference with a model whose layers are on several processes


def prepare_pippy(
    model: Module,
    split_points: str | list[str] | None = "auto",
    no_split_module_classes: list[str] | None = None,
    example_args: tuple[Any, ...] | None = (),  # noqa: ARG001  # Accelerate's name
    example_kwargs: dict[str, Any] | None = None,  # noqa: ARG001  # Accelerate's name
    num_chunks: int | None = None,
    gather_output: bool | None = False,
) -> Any:
    """
    The same model, whose forward brings a batch through stages on all processes; there is no backward.

    The first process's batch counts; the others pass one of the same shapes. The last process gets the output, or all of them with
    `gather_output`, and the others `None`. A batch is cut in `num_chunks` parts along its first dimension, as many as there are
    processes by default; they need not be equally large. `split_points` names the modules at which the second and later stages
    begin; by default stages have about equally many weights, and modules of `no_split_module_classes` stay whole. Nothing is traced,
    so the examples are not needed; the names are Accelerate's.

    Each process has its stage on its device; the layers of others stay where they were.
    """
    PartialState()
    world = current_world()
    if world.size == 1:
        return model.to(world.device)
    begins = "auto" if split_points is None else split_points
    layers = plan_stages(model, world.size, begins, no_split=no_split_module_classes)
    staged = StagedModel(model, layers, world.device)
    staged.held = (world.rank,)
    # what this process computes with: all but the layers of other stages
    other = {id(part) for layer in layers if layer.stage != world.rank for part in layer.module.modules()}
    move_weights((part for part in model.modules() if id(part) not in other), world.device)
    stages, ranks = {world.rank: Stage(staged, world.rank)}, StageRanks(world.device, world.group, range(world.size))
    names = [layer.name for layer in layers]
    stage_of_layers = [layer.stage for layer in layers]
    model.hf_split_points = [names[stage_of_layers.index(stage)] for stage in range(1, world.size)]  # type: ignore[assignment]
    own_forward = model.forward

    def forward(*arguments: Any, **keywords: Any) -> Any:
        if staged.is_running:
            return own_forward(*arguments, **keywords)
        with torch.no_grad():
            batch = broadcast(send_to_device((arguments, keywords), world.device))
            output = ranks.forward(stages, microbatches(batch, num_chunks or world.size))
            return ranks.output_on_all(output) if gather_output else output

    # as Accelerate has it: `extract_model_from_parallel` finds the model's own forward so
    forward.__wrapped__ = own_forward  # type: ignore[attr-defined]
    model.forward = forward
    return model


def find_pippy_batch_size(args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> int | None:
    """The number of samples of the first argument that has some."""
    values = [*(args or ()), *(kwargs or {}).values()]
    return next((size for value in values if (size := ignorant_find_batch_size(value)) is not None), None)
