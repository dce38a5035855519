"""One object of a call of `prepare`, with what was requested for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accelerate_nb.runtime.training.compile import TorchDynamoPlugin


@dataclass(frozen=True, slots=True)
class PrepareRequest:
    """
    A model or an optimizer that a strategy is to prepare; whatever else a call has is no part of it.

    `is_placed` is whether it comes to this process's device, `is_trained` whether a model gets gradients, or is only evaluated.
    """

    value: Any
    compiling: TorchDynamoPlugin
    is_placed: bool = True
    is_trained: bool = True


@dataclass(frozen=True, slots=True)
class PrepareCall:
    """
    All objects of a call of `prepare`, for a strategy that makes one thing of several of them, and how batches are dealt out.

    `processes` is the number of all processes, of which `sequence_parts` together have one batch. `accelerator` is the one whose call
    it is, for functions of Accelerate's that get it.
    """

    objects: Sequence[Any]
    split_batches: bool = False
    processes: int = 1
    sequence_parts: int = 1
    accelerator: Any = None

    @property
    def replicas(self) -> int:
        """The number of different streams of batches."""
        return self.processes // self.sequence_parts

    def streams_of(self, loader: Any) -> int:
        """The number of different streams of batches of a loader, which may be prepared already."""
        return self.processes if getattr(loader, "more_axes", ()) else self.replicas

    @property
    def loaders(self) -> list[Any]:
        """The objects that have a size of batches."""
        return [item for item in self.objects if hasattr(item, "batch_size")]
