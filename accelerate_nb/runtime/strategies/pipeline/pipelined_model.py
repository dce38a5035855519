"""A model that is split into stages: its training steps, in the order of a schedule of `torch.distributed.pipelining`, and its forward."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    ScheduleDualPipeV,
    ScheduleZBVZeroBubble,
    _PipelineScheduleRuntime,
    get_schedule_class,
)
from torch.nn import Module

from accelerate_nb.config.value_types import did_you_mean
from accelerate_nb.errors import ConfigurationError, DataError, StateError
from accelerate_nb.runtime.strategies.base import Inputs, LossOf
from accelerate_nb.runtime.strategies.pipeline.microbatches import batch_size, merged, microbatches, output_on_all
from accelerate_nb.runtime.strategies.pipeline.staged_model import Stage, StagedModel
from accelerate_nb.runtime.training.repoint import named_weights
from accelerate_nb.runtime.training.unwrap import ModelWrapper
from accelerate_nb.runtime.world.world import World

# torch's names, of which those with several stages a process are the later ones.
NAMES = ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
_IN_A_V = (ScheduleZBVZeroBubble, ScheduleDualPipeV)


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
        return get_schedule_class(self.name)

    @property
    def stage_ranks(self) -> list[int]:
        """For each stage the index of its process: around in a circle, or, for some schedules, there and back."""
        there = list(range(self.processes))
        if issubclass(self.schedule_class, PipelineScheduleSingle):
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
        if schedule.schedule_class in _IN_A_V and not issubclass(schedule.schedule_class, _PipelineScheduleRuntime):
            raise ConfigurationError(
                f"The schedule {schedule.name!r} was requested, but that of torch {torch.__version__} can't pass a tensor between two "
                "stages of one process. Take 'DualPipeV', or a later torch."
            )
        several = issubclass(schedule.schedule_class, PipelineScheduleMulti)
        try:
            self._schedule = schedule.schedule_class(
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
        self.staged, self.ranks, self.schedule, self.count, self.shared = staged, ranks, schedule, count, shared
        self.stages = stages
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
