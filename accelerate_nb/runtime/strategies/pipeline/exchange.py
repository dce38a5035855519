"""Tensors that pass between the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class StageExchange:
    """
    Sends tensors between stages, each to the process of a stage; between stages of one process they are handed over.

    What one process sends to another is received in the same order. `group` is that of the pipeline's processes, which are `ranks`,
    and `stage_ranks` has each stage's index among these.
    """

    def __init__(self, device: torch.device, group: Any, ranks: Sequence[int], stage_ranks: Sequence[int]) -> None:
        self.device, self.group, self.stage_ranks = device, group, stage_ranks
        self._ranks = ranks
        self._sent: list[tuple[Any, Tensor]] = []
        self._handed_over: dict[tuple[int, int, int], list[Tensor]] = {}

    def send(self, tensors: Sequence[Tensor], source: int, target: int, number: int) -> None:
        """Send a part's tensors from one stage to another."""
        if self.stage_ranks[source] == self.stage_ranks[target]:
            self._handed_over[source, target, number] = list(tensors)
            return
        rank = self._ranks[self.stage_ranks[target]]
        for tensor in tensors:
            contiguous = tensor.contiguous()
            self._sent.append((dist.isend(contiguous, rank, group=self.group), contiguous))

    def receive(self, like: Sequence[Tensor], source: int, target: int, number: int) -> list[Tensor]:
        """The tensors of these shapes that one stage sent to another for a part."""
        if self.stage_ranks[source] == self.stage_ranks[target]:
            return self._handed_over.pop((source, target, number))
        rank = self._ranks[self.stage_ranks[source]]
        found = [torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device) for tensor in like]
        for tensor in found:
            dist.recv(tensor, rank, group=self.group)
        return found

    def finish(self) -> None:
        """Wait until all that was sent has been received."""
        sent, self._sent = self._sent, []
        for work, _ in sent:
            work.wait()

    def broadcast_object(self, value: Any, stage: int) -> Any:
        """An object of a stage's process, on all processes."""
        held = [value]
        dist.broadcast_object_list(held, self._ranks[self.stage_ranks[stage]], group=self.group)
        return held[0]

    def broadcast(self, tensor: Tensor, stage: int) -> None:
        """Fill a tensor with that of a stage's process."""
        dist.broadcast(tensor, self._ranks[self.stage_ranks[stage]], group=self.group)
