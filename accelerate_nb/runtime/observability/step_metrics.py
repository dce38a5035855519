"""The metrics of a training that nobody has to log: a step's time, throughput, gradient norm, learning rate, memory, use of the GPU."""

import os
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from accelerate_nb.devices.nvml import GpuGauge
from accelerate_nb.events.event_types import MemoryUse, Metric
from accelerate_nb.rank.event_sink import emit, outlet
from accelerate_nb.runtime.observability.phase_timer import PhaseTimer
from accelerate_nb.runtime.operations.nested import ignorant_find_batch_size

# Seconds between two points of a metric: a person sees no more, and a step of a millisecond does not notice.
_BETWEEN = 0.25
_GIB = 2**30


class StepMetrics:
    """Measures one process's steps, and sends their means a few times a second; never waits for a device."""

    # The clock runs from a loader's beginning, or from one step to the next: an evaluation between two steps counts for nothing. A step
    # is one of the optimizer that steps first. `share` is the part of this process's samples that no other process reads.

    def __init__(self, rank: int, device: torch.device, share: float, phases: PhaseTimer) -> None:
        self.phases = phases
        self.memory: MemoryReporter | None = None
        self._rank, self._device, self._share = rank, device, share
        self._gpu = _GpuPercent(device.index or 0)
        self._optimizer: ReferenceType[Any] | None = None
        self.steps = 0
        self._since: float | None = None
        self._sent_at = 0.0
        self._norm: _PendingNumber | None = None
        self._read: tuple[Any, int, int | None] | None = None
        self._epoch: float | None = None
        # of the next point: steps, seconds, samples and tokens, and what was read since the last step
        self._counted, self._seconds, self._samples, self._tokens = 0, 0.0, 0.0, 0.0
        self._pending_samples = self._pending_tokens = 0.0

    def through(self, loader: Any, batches: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """A loader's batches of one epoch, counted as they are read."""
        left = loader.batches_left
        length = None if left is None else left + loader.batches_read
        share = 1.0 if loader.more_axes else self._share
        self._begin_step()
        try:
            # a loop that is left early ends the reading here, not when the last reference to it goes
            with closing(batches):
                for batch in self.phases.batches(batches, getattr(loader, "num_workers", None)):
                    if self._since is None:
                        self._begin_step()
                    self._read = loader, loader.iteration, length
                    self._pending_samples += share * (ignorant_find_batch_size(batch) or 0)
                    self._pending_tokens += share * _tokens(batch)
                    yield batch
        finally:
            # what was read and led to no step, such as an evaluation, is no training
            self._since = None
            self.phases.discard()
            self._pending_samples = self._pending_tokens = 0.0
            optimizer, now = None if self._optimizer is None else self._optimizer(), time.perf_counter()
            if optimizer is not None and now - self._sent_at >= _BETWEEN / 4:
                self._send(optimizer, now)

    def _begin_step(self) -> None:
        self._since = time.perf_counter()
        self.phases.restart()

    def clipped(self, norm: Any) -> None:
        """Keep the norm that gradients had before they were clipped."""
        if isinstance(norm, Tensor) and type(norm) is Tensor and norm.numel() == 1:
            if self._norm is None:
                self._norm = _PendingNumber(norm)
        elif isinstance(norm, float):
            self._norm = _PendingNumber(torch.tensor(norm))

    def stepped(self, optimizer: Any) -> None:
        if self._optimizer is None or (first := self._optimizer()) is None:
            self._optimizer = ref(optimizer)
        elif first is not optimizer:
            self.phases.end()
            return
        self.phases.stepped()
        now = time.perf_counter()
        self.steps += 1
        # the first step compiles, and allocates: it would be higher than all others
        if self._since is not None and self.steps > 1:
            self._seconds += now - self._since
            self._counted += 1
            self._samples += self._pending_samples
            self._tokens += self._pending_tokens
        self._since = now
        self._pending_samples = self._pending_tokens = 0.0
        if self._read is not None:
            loader, epoch, length = self._read
            self._epoch = epoch + loader.batches_read / length if length else None
        if now - self._sent_at >= _BETWEEN:
            self._send(optimizer, now)

    def _send(self, optimizer: Any, now: float) -> None:
        if outlet() is None or not self._counted:
            return
        moment, self._sent_at = time.time(), now
        for name, value in self._values(optimizer):
            emit(Metric(self._rank, name, value, self.steps, moment))
        self._counted, self._seconds, self._samples, self._tokens = 0, 0.0, 0.0, 0.0
        self._pending_samples = self._pending_tokens = 0.0
        if self.memory is not None:
            self.memory.stepped()

    def _values(self, optimizer: Any) -> Iterator[tuple[str, float]]:
        yield "speed/step_time_s", self._seconds / self._counted
        if self._samples:
            yield "speed/samples_per_s", self._samples / self._seconds
        if self._tokens:
            yield "speed/tokens_per_s", self._tokens / self._seconds
        if self._norm is not None and (norm := self._norm.value()) is not None:
            self._norm = None
            yield "optimizer/grad_norm", norm
        rates = {group["lr"] for group in optimizer.param_groups if isinstance(group.get("lr"), (int, float))}
        if len(rates) == 1:
            yield "optimizer/lr", float(rates.pop())
        else:
            yield from ((f"optimizer/lr/{index}", float(rate)) for index, rate in enumerate(sorted(rates)[:4]))
        if self._epoch is not None:
            yield "epoch", self._epoch
        if self._device.type == "cuda":
            yield "memory/gpu_gib", torch.cuda.memory_allocated(self._device) / _GIB
            if (busy := self._gpu.take()) is not None:
                yield "speed/gpu_percent", busy
        elif (resident := resident_bytes()) is not None:
            yield "memory/process_gib", resident / _GIB


@dataclass(eq=False)
class _GpuPercent:
    """How busy a GPU is, sampled in a thread: a driver that responds late, or never, keeps no step waiting."""

    _index: int
    _gauge: GpuGauge | None = None
    _sampling: threading.Thread | None = None
    _percent: float | None = None

    def take(self) -> float | None:
        """The last sample, once, while the next one begins; `None` where there is none yet."""
        if self._sampling is not None and self._sampling.is_alive():
            return None
        taken, self._percent = self._percent, None
        self._sampling = threading.Thread(target=self._sample, name="accelerate_nb GPU", daemon=True)
        self._sampling.start()
        return taken

    def _sample(self) -> None:
        # no sooner than now: where nobody watches, the library is never loaded
        self._gauge = self._gauge or GpuGauge(os.environ)
        sample = self._gauge.sample(self._index, time.time())
        self._percent = None if sample is None else sample.utilisation


class _PendingNumber:
    """A number that a device may still be computing: its value is there once it has, and nobody waits for it."""

    def __init__(self, number: Tensor) -> None:
        self._done: torch.cuda.Event | None = None
        number = number.detach()
        if number.device.type == "cuda":
            pinned = torch.empty((), dtype=number.dtype, pin_memory=True)
            pinned.copy_(number.reshape(()), non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()
            number = pinned
        self._number = number

    def value(self) -> float | None:
        """The number; `None` where it is still being computed, or would have to be waited for."""
        if self._done is not None and not self._done.query():
            return None
        return float(self._number) if self._number.device.type == "cpu" else None


def _tokens(batch: Any) -> int:
    """The number of tokens in a batch: the elements of its `input_ids`, 0 where it has none."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return int(ids.numel()) if isinstance(ids, Tensor) else 0


# Seconds between two samples: a sample takes some tens of microseconds.
_BETWEEN_READINGS = 5.0
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


@dataclass(eq=False)
class MemoryReporter:
    """Sends what prepared models and optimizers hold on this rank's device, where somebody listens."""

    _models: Iterable[Any]
    _optimizers: Iterable[Any]
    _device: torch.device
    _held: tuple[int, int, int] | None = None
    _sent_at: float = 0.0
    _sent: tuple[int | None, int | None] = (None, None)

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
        if self._held is not None and time.perf_counter() - self._sent_at >= _BETWEEN_READINGS:
            self._send()

    def _send(self) -> None:
        if self._held is None or (listener := outlet()) is None:
            return
        self._sent_at = time.perf_counter()
        # on a GPU the allocator knows the peak, and the driver all that is in use; on a CPU the process's memory is all that is known
        peak = used = total = None
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            peak, used = torch.cuda.max_memory_allocated(self._device), total - free
        elif self._device.type == "cpu":
            used = resident_bytes()
        if (peak, used) != self._sent:
            self._sent = peak, used
            emit(MemoryUse(listener.rank, *self._held, peak, time.time(), used, total))

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
