"""The function in this very process: one rank, its own breakpoints and debugger."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TextIO, cast

from accelerate_nb.config.environment import set_variables
from accelerate_nb.events.event_types import Event, FirstStep, State, StateChange
from accelerate_nb.failures.hang_report import StackSnapshot
from accelerate_nb.failures.rank_result import RankResult
from accelerate_nb.launching.group_runner import RunContext
from accelerate_nb.launching.step_requests import StopNegotiation
from accelerate_nb.launching.worker_group import Stop, WorkerGroup
from accelerate_nb.rank import background_tasks
from accelerate_nb.rank.event_sink import EventSink, connect, outlet
from accelerate_nb.rank.step_hold import STOP, current_step_hold
from accelerate_nb.sources.cells import current_sources
from accelerate_nb.transport.messages import ChangeKnobAfter, HoldAtStep, Message
from accelerate_nb.transport.outcome import failure_of
from accelerate_nb.transport.spawned_processes import send_main_by_value
from accelerate_nb.worker.launched_call import launched_call


class InlineWorkers:
    """A worker group that is a plain call; what it prints goes where this process prints."""

    timed_out: StackSnapshot | None = None

    def __init__(
        self, call: Callable[[], Any], environ: Mapping[str, str], run_context: RunContext, rank: int = 0, size: int = 1
    ) -> None:
        self._call, self._environ, self._run_context = call, environ, run_context
        self._rank, self._size = rank, size
        self.group = WorkerGroup(size, run_context.stop_grace_period)

    def follow(self) -> tuple[RankResult, ...]:
        send_main_by_value()
        step_hold = current_step_hold()
        step_hold.reset()
        try:
            return self._called()
        finally:
            if step_hold.steps:
                self._run_context.take(FirstStep(0, time.time()))
            # a stop of this call does not stop what this process does next
            self.group.stopped_at = step_hold.stopped_at
            step_hold.reset()

    def _called(self) -> tuple[RankResult, ...]:
        self._send_state("running")
        try:
            values = self._values()
        except KeyboardInterrupt:
            self._send_state("stopped")
            raise
        except BaseException as error:  # noqa: BLE001 - reported, then raised again as what every engine raises
            background_tasks.salvage()
            failure = failure_of(error, self._rank, current_sources())
            self._run_context.take(failure)
            self._send_state("failed")
            own = RankResult(self._rank, failure=failure, error=error)
            return tuple(own if rank == self._rank else RankResult(rank) for rank in range(self._size))
        self._send_state("finished")
        return tuple(RankResult(rank, value=value) for rank, value in enumerate(values))

    def _values(self) -> list[Any]:
        """The return value of each rank's function, once it is called."""
        with set_variables(self._environ, os.environ):
            value = self._call()
            background_tasks.finish()
        return [value]

    def _send_state(self, state: State) -> None:
        self._run_context.take(StateChange(self._rank, state, time.time()))

    def send(self, rank: int, message: Message, descriptors: Sequence[int] = ()) -> None:
        """A call has no inbox; of what goes there, changes of knobs are made here."""
        match message:
            case HoldAtStep(_, number):
                self._run_context.take(current_step_hold().hold(rank, number))
            case ChangeKnobAfter(number, name, value, after):
                current_step_hold().change_knob_after(number, name, value, after)

    def task_reply(self, rank: int, task: int) -> int:
        """A call takes no tasks, so it has no replies: raises `KeyError`."""
        raise KeyError((rank, task))

    def restart_watchdog(self, timeout: float) -> None:
        """A call has no watchdog."""

    def stop(self, how: Stop) -> None:
        """Let the call end at its next boundary; one that has none can't be stopped from outside, but by an interrupt."""
        if (position := current_step_hold().hold(0, STOP)).has_boundary:
            negotiation = StopNegotiation([0], self._run_context.stop_grace_period, time.monotonic())
            negotiation.reply(0, position, time.monotonic())
            current_step_hold().stop_at(negotiation.stop_point_of(0))

    def snapshot(self) -> StackSnapshot:
        """Empty: this process's own tools show where the call is."""
        return StackSnapshot({}, {})


class LaunchedProcessWorkers(InlineWorkers):
    """The same in each process that a launcher started already: all call the function, and get each other's values and metrics."""

    def follow(self) -> tuple[RankResult, ...]:
        """Call the function; a stop is that of the launcher's own run."""
        try:
            return self._called()
        finally:
            self.group.stopped_at = current_step_hold().stopped_at

    def _values(self) -> list[Any]:
        values, facts = launched_call(self._call_with_copies, self._environ, "all", self._facts)
        folder = self._run_context.record.folder
        for rank, (other_folder, events) in enumerate(facts):
            if rank == self._rank:
                continue
            for event in events:
                self._run_context.take(event)
            log = Path(other_folder) / f"rank_{rank}.log"
            # one on another machine stays there
            if log.exists():
                with suppress(OSError):
                    (folder / log.name).symlink_to(log)
        return values

    def _call_with_copies(self) -> Any:
        """Call the function; the run has a copy of this process's events meanwhile, and of what is written to Python's streams."""
        # what compiled code writes, or a logger that was made before, is not copied; all of it goes where it always does
        before = outlet()
        connect(_CopiedEvents(self._rank, self._run_context, before))
        stdout, stderr = (
            cast("TextIO", _CopiedStream(stream, self._rank, self._run_context)) for stream in (sys.stdout, sys.stderr)
        )
        try:
            with redirect_stdout(stdout), redirect_stderr(stderr):
                return self._call()
        finally:
            connect(before)

    def _facts(self) -> tuple[str, list[Event]]:
        """The folder with this rank's log, and the events that its metrics and bars are made of."""
        self._run_context.record.flush()
        view = self._run_context.view.rank(self._rank)
        metrics = [metric for series in view.series.values() for metric in series]
        return str(self._run_context.record.folder), [
            *metrics,
            *view.progress.values(),
            StateChange(self._rank, "finished", time.time()),
        ]

    def stop(self, how: Stop) -> None:
        """The launcher of the processes stops them."""


class _CopiedEvents:
    """A sink that gives a run each event before it passes it on."""

    def __init__(self, rank: int, run_context: RunContext, before: EventSink | None) -> None:
        self.rank, self._run_context, self._before = rank, run_context, before

    def send(self, event: Event) -> None:
        """Pass an event on."""
        self._run_context.take(event)
        if self._before is not None:
            self._before.send(event)


class _CopiedStream:
    """A stream that is written to as before, with a copy in a rank's log."""

    def __init__(self, stream: TextIO, rank: int, run_context: RunContext) -> None:
        self._stream, self._rank, self._run_context = stream, rank, run_context

    def write(self, text: str) -> int:
        """Write, and copy."""
        written = self._stream.write(text)
        self._run_context.record.output(self._rank, text.encode("utf-8", "surrogateescape"))
        return written

    def writelines(self, lines: Any) -> None:
        """Write one text after the other."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
