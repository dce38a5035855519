"""The time of each part of a step: data, forward, backward, communication, optimizer, and what is none of these."""

from __future__ import annotations

import os
import string
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn import Module

from accelerate_nb.events.event_types import StepBreakdown
from accelerate_nb.rank.event_sink import emit

Phase: TypeAlias = Literal["data", "forward", "backward", "communication", "optimizer", "idle"]
_PHASES: tuple[Phase, ...] = get_args(Phase)
# The beginning of a phase: seconds of the host's clock, or an event in the stream of a GPU.
Mark: TypeAlias = Any

# Seconds between two events of a rank.
_BETWEEN = 1.0
# On a GPU each mark takes some microseconds of the host, so that not every step is measured.
_BETWEEN_GPU_STEPS = 0.1
# A step of more marks than these, of very many accumulated batches, is not measured.
_MOST_MARKS = 4000
_MOST_PENDING = 16
_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


class PhaseTimer:
    """Attributes the time of one process's steps to their phases, and sends means; as a block, it ends the current phase."""

    # On a CPU the host's clock counts; on a GPU events in its stream do, which are read once they have happened: nothing waits for the
    # device. A backward ends where its last gradient is computed; what follows is the communication that computation does not hide.

    def __init__(self, rank: int, device: torch.device, size: int) -> None:
        self._rank, self._size = rank, size
        self._clock = _GpuClock(device) if device.type == "cuda" else _HostClock()
        self._stack: list[Phase] = []
        self._marks: list[tuple[Phase, Mark]] = []
        self._pending: deque[tuple[int, list[tuple[Phase, Mark]]]] = deque(maxlen=_MOST_PENDING)
        self._measured_at = self._sent_at = 0.0
        self._step = 0
        self._workers: int | None = None
        self._sums = dict.fromkeys(_PHASES, 0.0)
        self._summed = 0
        # the newest step that was sent, and what had been waited for a core until then
        self._sent_step, self._preempted = 0, _preempted()

    def restart(self) -> None:
        """A step begins here, whatever came before."""
        self.discard()
        now = time.perf_counter()
        if now - self._measured_at >= self._clock.pause:
            self._measured_at = now
            self._mark("idle")

    def discard(self) -> None:
        """What came since the last step leads to none."""
        self._stack.clear()
        self._marks.clear()

    def begin(self, phase: Phase) -> None:
        """A phase begins inside of the current one."""
        if not self._marks:
            return
        if phase == "backward" and [name for name, _ in self._marks[-2:]] == ["data", "idle"]:
            # where no hook tells of a forward, it is what the loop does from its batch to the backward
            self._marks[-1] = ("forward", self._marks[-1][1])
        self._stack.append(phase)
        self._mark(phase)

    def end(self) -> None:
        if self._stack:
            self._stack.pop()
            self._mark(self._stack[-1] if self._stack else "idle")

    def batches(self, source: Iterable[Any], workers: int | None) -> Iterator[Any]:
        """The batches of a loader with so many worker processes; the time that the loop waits for each is the phase "data"."""
        self._workers = workers
        iterator = iter(source)
        while True:
            self.begin("data")
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                self.end()
            yield batch

    def watch(self, model: Module) -> None:
        """Measure the forward of a model."""
        # what torch compiles in place takes its hooks along
        if getattr(model, "_compiled_call_impl", None) is None:
            model.register_forward_pre_hook(_ForwardHook(self, begins=True), with_kwargs=True)
            model.register_forward_hook(_ForwardHook(self, begins=False))

    def backward(self, loss: Any) -> PhaseTimer:
        """A block of the phase "backward", which ends when the last gradient of this loss is computed; then others may be waited for."""
        self.begin("backward")
        if self._size > 1 and self._stack and isinstance(loss, Tensor) and loss.requires_grad:
            # callbacks are called in their order, and a strategy that waits for others asks for its own later
            loss.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(self._computed))
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None:
        self.end()

    def stepped(self) -> None:
        """An optimizer has stepped: the next step begins."""
        if self._clock.is_stopped():
            return self.discard()
        self._step += 1
        if self._marks and len(self._marks) < _MOST_MARKS:
            self._stack.clear()
            self._mark("idle")
            self._pending.append((self._step, self._marks))
            self._marks = []
        while self._pending and self._clock.is_past(self._pending[0][1][-1][1]):
            step, marks = self._pending.popleft()
            seconds = dict.fromkeys(_PHASES, 0.0)
            for (phase, since), (_, until) in pairwise(marks):
                seconds[phase] += self._clock.seconds(since, until)
            self._take(step, seconds)
        return self.restart()

    def _mark(self, phase: Phase) -> None:
        if len(self._marks) < _MOST_MARKS and not self._clock.is_stopped():
            self._marks.append((phase, self._clock.now()))

    def _computed(self) -> None:
        if self._stack and self._stack[-1] == "backward":
            self._stack[-1] = "communication"
            self._mark("communication")

    def _take(self, step: int, seconds: dict[Phase, float]) -> None:
        if step == 1:
            # it compiles, and allocates
            self._send(step, seconds, 1)
            return
        for phase, value in seconds.items():
            self._sums[phase] += value
        self._summed += 1
        if (now := time.perf_counter()) - self._sent_at >= _BETWEEN:
            self._sent_at = now
            self._send(step, self._sums, self._summed)
            self._sums, self._summed = dict.fromkeys(_PHASES, 0.0), 0

    def _send(self, step: int, seconds: dict[Phase, float], steps: int) -> None:
        means = {phase: value / steps for phase, value in seconds.items()}
        # `torch.compile` has made a graph in this process
        dynamo = sys.modules.get("torch._dynamo.utils")
        compiled = step == 1 and dynamo is not None and bool(dynamo.counters["stats"].get("unique_graphs"))
        until, since = _preempted(), self._preempted
        preempted = None if until is None or since is None else (until - since) / max(step - self._sent_step, 1)
        self._sent_step, self._preempted = step, until
        emit(
            StepBreakdown(
                self._rank, step, **means, workers=self._workers, compiled=compiled, time=time.time(), preempted=preempted,
                cores=_CORES,
            )
        )  # fmt: skip


class _HostClock:
    """The host's clock; every step is measured."""

    pause = 0.0
    now = staticmethod(time.perf_counter)

    def is_stopped(self) -> bool:
        return False

    def is_past(self, mark: Mark) -> bool:
        return True

    def seconds(self, since: Mark, until: Mark) -> float:
        return float(until - since)


@dataclass(eq=False)
class _GpuClock:
    """Events in the stream of a GPU, a few steps a second."""

    pause = _BETWEEN_GPU_STEPS
    _device: torch.device

    def is_stopped(self) -> bool:
        """Whether work is captured for a graph: an event would become a part of it, and a look at one would break it off."""
        return torch.cuda.is_current_stream_capturing()

    def now(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def is_past(self, mark: Mark) -> bool:
        return bool(mark.query())

    def seconds(self, since: Mark, until: Mark) -> float:
        return float(since.elapsed_time(until)) / 1000


@dataclass(eq=False)
class _ForwardHook:
    """A hook of a model's forward; a copy of the model, or a file of it, has one that does nothing."""

    timer: PhaseTimer
    begins: bool

    def __call__(self, model: Module, *_: Any) -> None:
        # in a graph that a person compiles of the model, a clock would be a break
        if not model.training or torch.compiler.is_compiling():
            return
        if self.begins:
            self.timer.begin("forward")
        else:
            self.timer.end()

    def __reduce__(self) -> tuple[Any, ...]:
        # with the three arguments of either hook, and without this package where the file is read
        return getattr, (string.Formatter(), "check_unused_args")


def unwatch(model: Any) -> None:
    """Take the hooks of `PhaseTimer.watch` from a model that leaves the training: `torch.jit.script` knows no such hooks."""
    if not isinstance(model, Module):
        return
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for key in [key for key, hook in hooks.items() if isinstance(hook, _ForwardHook)]:
            del hooks[key]
            model._forward_pre_hooks_with_kwargs.pop(key, None)


def _preempted() -> float | None:
    """The seconds that this thread was ready to run and had no core, by Linux's /proc; `None` elsewhere."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError):
        return None
