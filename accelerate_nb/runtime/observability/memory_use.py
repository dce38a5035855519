"""The memory that a rank's training holds: measured once its first step is made, its peak every few seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from accelerate_nb.events.model import MemoryUse
from accelerate_nb.rank.event_sink import emit, outlet

# Seconds between two samples: a sample takes some tens of microseconds.
_BETWEEN = 5.0
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class MemoryReporter:
    """
    Sends what prepared models and optimizers hold on this rank's device, where somebody listens.

    On a GPU the allocator knows the peak, and the driver what else is in use there. On a CPU the memory of the process is all that is
    known beside the tensors.
    """

    def __init__(self, models: Iterable[Any], optimizers: Iterable[Any], device: torch.device) -> None:
        self._models, self._optimizers, self._device = models, optimizers, device
        self._held: tuple[int, int, int] | None = None
        self._sent_at = 0.0
        self._sent: tuple[int | None, int | None] = (None, None)

    def first_step(self) -> None:
        """Measure all, before gradients are thrown away."""
        if outlet() is None:
            return
        tensors = [tensor for model in self._models for tensor in (*model.parameters(), *model.buffers())]
        states = [value for optimizer in self._optimizers for value in optimizer.state.values()]
        state = (value for values in states if isinstance(values, dict) for value in values.values())
        self._held = (
            self._bytes(tensors),
            self._bytes(tensor.grad for tensor in tensors if tensor.grad is not None),
            self._bytes(value for value in state if isinstance(value, Tensor)),
        )
        self._send()

    def stepped(self) -> None:
        """Measure the peak again, where it is time to."""
        if self._held is not None and time.perf_counter() - self._sent_at >= _BETWEEN:
            self._send()

    def _send(self) -> None:
        if self._held is None or (listener := outlet()) is None:
            return
        self._sent_at = time.perf_counter()
        peak, used, total = self._measured()
        if (peak, used) != self._sent:
            self._sent = peak, used
            emit(MemoryUse(listener.rank, *self._held, peak, time.time(), used, total))

    def _measured(self) -> tuple[int | None, int | None, int | None]:
        """The peak of what was allocated, the memory in use, and all of the device's."""
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            return torch.cuda.max_memory_allocated(self._device), total - free, total
        return None, resident_bytes() if self._device.type == "cpu" else None, None

    def _bytes(self, tensors: Iterable[Tensor]) -> int:
        # a part of a tensor by the name of the method, since it takes half a second to load the class
        parts = (tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors)
        return sum(part.nbytes for part in parts if part.device.type == self._device.type)


def resident_bytes() -> int | None:
    """The memory of this process in bytes, by Linux's /proc; `None` elsewhere."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return None
