"""A model that is split into stages, as a training loop calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from accelerate_nb.errors import DataError
from accelerate_nb.runtime.strategies.pipeline.exchange import StageExchange
from accelerate_nb.runtime.strategies.pipeline.microbatches import batch_size, microbatches
from accelerate_nb.runtime.strategies.pipeline.schedules import Schedule, ScheduledRun
from accelerate_nb.runtime.strategies.pipeline.shared_gradients import SharedGradients
from accelerate_nb.runtime.strategies.pipeline.stage import Stage
from accelerate_nb.runtime.strategies.pipeline.staged_model import Inputs, StagedModel
from accelerate_nb.runtime.strategies.pipeline.two_phases import TwoPhaseRun
from accelerate_nb.runtime.training.unwrap import ModelWrapper


class PipelinedModel(ModelWrapper):
    """
    The model, whose layers are on several processes; a call brings a batch through all of them in parts.

    All processes of the pipeline call it with the same batch, and get the same output. A backward of a loss of it goes back
    through all stages. `module` is the model itself, with weights on the meta device in place of other stages'.
    """

    def __init__(
        self,
        staged: StagedModel,
        stages: Mapping[int, Stage],
        exchange: StageExchange,
        schedule: Schedule,
        count: int,
        shared: SharedGradients,
    ) -> None:
        super().__init__(staged.model)
        self.staged, self.exchange, self.schedule, self.count, self.shared = staged, exchange, schedule, count, shared
        self._stages = dict(stages)
        self._runs: dict[Any, ScheduledRun] = {}

    @property
    def stages(self) -> Mapping[int, Stage]:
        """The stages of this process, by their indices."""
        return self._stages

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """The model's output for the whole batch."""
        parts = microbatches((arguments, keywords), self.count)
        return TwoPhaseRun(self._stages, self.exchange, parts, self.shared.added).forward()

    def train_step(
        self, inputs: Inputs, targets: Any, loss_of: Callable[[Any, Any], Tensor], scale: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """
        Forward and backward of a batch in the order of the schedule; the mean of the parts' losses, on all processes.

        `loss_of` gets a part's output and targets, and `scale` makes of its loss what gradients are computed of.
        """
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

        with self.shared.added():
            self._run(parts).step(parts, loss_of_part)
        last = self.staged.count - 1
        total = torch.stack(losses).mean() if losses else torch.zeros((), device=self.exchange.device)
        total = total.float()
        self.exchange.broadcast(total, last)
        return total

    def _run(self, parts: Sequence[Inputs]) -> ScheduledRun:
        key = self.staged.key(parts[0])
        if key not in self._runs:
            self._runs = {
                key: ScheduledRun(self.schedule, self._stages, self.exchange.group, self.exchange.device, parts)
            }
        return self._runs[key]
