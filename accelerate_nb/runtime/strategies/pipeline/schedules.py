"""The schedules of `torch.distributed.pipelining`, which mix the forwards and backwards of a batch's parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
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

from accelerate_nb.config.did_you_mean import did_you_mean
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.strategies.pipeline.stage import Stage
from accelerate_nb.runtime.strategies.pipeline.staged_model import Inputs

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
    def stages_per_process(self) -> int:
        """The number of stages that each process has."""
        return 1 if issubclass(self.schedule_class, PipelineScheduleSingle) else 2

    @property
    def stage_ranks(self) -> list[int]:
        """For each stage the index of its process: around in a circle, or, for some schedules, there and back."""
        there = list(range(self.processes))
        if self.stages_per_process == 1:
            return there
        return there + (there[::-1] if self.schedule_class in _IN_A_V else there)


class _Stage(PipelineStage):
    """A stage that connects to its neighbours when it first sends, but on CUDA devices, whose library wants that before."""

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        # torch 2.9 receives four bytes where it sends eight, which gloo refuses
        return super()._get_init_p2p_neighbors_ops() if self.device.type == "cuda" else []


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
                made if several else made[0], n_microbatches=self.count, loss_fn=_sum, scale_grads=False
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

    def step(self, parts: Sequence[Inputs], loss_of_part: Callable[[Any, int], Tensor]) -> list[Tensor]:
        """Forward and backward of all parts; the losses of the parts, on the last stage's process."""
        losses: list[Tensor] = []

        def finish(output: Any, number: int) -> Tensor:
            loss = loss_of_part(output, number)
            losses.append(loss.detach())
            # FSDP warns about a view that a module returns
            return loss.reshape(1).clone()

        for stage in self.stages.values():
            stage.parts, stage.finish = parts, finish
        try:
            self._schedule.step(number=torch.arange(self.count), target=torch.zeros(self.count, 1), losses=[])
        finally:
            for stage in self.stages.values():
                stage.parts, stage.finish = (), None
        return losses


def _sum(output: Tensor, _target: Tensor) -> Tensor:
    return output.sum()


def _with_gradient(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.is_floating_point())
