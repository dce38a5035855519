"""The function in this very process: one rank, its own breakpoints and debugger."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from accelerate_nb.config.environment import set_variables
from accelerate_nb.events.model import FirstStep, StateChange
from accelerate_nb.failures.hang_report import StackSnapshot
from accelerate_nb.failures.rank_result import RankResult
from accelerate_nb.launching.graceful_stop import StopNegotiation
from accelerate_nb.launching.run_context import RunContext, Stop
from accelerate_nb.rank import background_tasks
from accelerate_nb.rank.knobs import current_knobs
from accelerate_nb.rank.stop_request import current_stop_request
from accelerate_nb.sources.cells import current_sources
from accelerate_nb.transport.outcome import failure_of
from accelerate_nb.transport.protocol.knob_messages import ChangeKnobAfter, HoldForKnob
from accelerate_nb.transport.protocol.message import Message


class InlineWorkers:
    """A worker group that is a plain call; what it prints goes where this process prints."""

    began = True
    timed_out: StackSnapshot | None = None
    stopped_at: str | None = None
    lost: str | None = None
    lost_ranks: Collection[int] = ()

    def __init__(self, call: Callable[[], Any], environ: dict[str, str], run_context: RunContext) -> None:
        self._call, self._environ, self._run_context = call, environ, run_context

    def follow(self) -> tuple[RankResult, ...]:
        """Call the function."""
        stop_request = current_stop_request()
        stop_request.reset()
        try:
            return self._called()
        finally:
            if stop_request.steps:
                self._run_context.take(FirstStep(0, time.time()))
            # a stop of this call does not stop what this process does next
            self.stopped_at = stop_request.stopped_at
            stop_request.reset()

    def _called(self) -> tuple[RankResult, ...]:
        self._run_context.take(StateChange(0, "running", time.time()))
        try:
            with set_variables(self._environ, os.environ):
                value = self._call()
                background_tasks.finish()
        except KeyboardInterrupt:
            self._run_context.take(StateChange(0, "stopped", time.time()))
            raise
        except BaseException as error:  # noqa: BLE001 - reported, then raised again as what every engine raises
            background_tasks.salvage()
            failure = failure_of(error, 0, current_sources())
            self._run_context.take(failure)
            self._run_context.take(StateChange(0, "failed", time.time()))
            return (RankResult(0, failure=failure, error=error),)
        self._run_context.take(StateChange(0, "finished", time.time()))
        return (RankResult(0, value=value),)

    def send(self, rank: int, message: Message, descriptors: Sequence[int] = ()) -> None:
        """A call has no inbox; of what goes there, changes of knobs are made here."""
        match message:
            case HoldForKnob(_, number):
                self._run_context.take(current_knobs().hold(rank, number))
            case ChangeKnobAfter(number, name, value, after):
                current_knobs().change(number, name, value, after)

    def task_reply(self, rank: int, task: int) -> int:
        """A call takes no tasks, so it has no replies: raises `KeyError`."""
        raise KeyError((rank, task))

    def restart_watchdog(self, timeout: float) -> None:
        """A call has no watchdog."""

    def stop(self, how: Stop) -> None:
        """Let the call end at its next boundary; one that has none can't be stopped from outside, but by an interrupt."""
        if (position := current_stop_request().hold()) is not None:
            negotiation = StopNegotiation([0], self._run_context.stop_grace_period, time.monotonic())
            negotiation.reply(0, position, time.monotonic())
            current_stop_request().until(negotiation.stop_point_of(0))

    def snapshot(self) -> StackSnapshot:
        """Empty: this process's own tools show where the call is."""
        return StackSnapshot({}, {})
