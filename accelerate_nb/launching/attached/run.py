"""The function in processes that a launcher started already: this one is one rank, and runs it right here."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from accelerate_nb.config.environment import runs_folder
from accelerate_nb.config.run_config import RunConfig
from accelerate_nb.devices.probe import probe
from accelerate_nb.events.line_reader import OutputLine
from accelerate_nb.events.model import Event, Failure, LogLine, State, StateChange, Stream
from accelerate_nb.events.rank_state import RankState
from accelerate_nb.events.run_folder import RunRecorder, new_folder, prune
from accelerate_nb.events.run_state import RunState
from accelerate_nb.failures.rank_result import RankResult
from accelerate_nb.launching.attached.call import AttachedCall, RankReport
from accelerate_nb.launching.attached.tee import tee_output
from accelerate_nb.launching.engines.inline import InlineWorkers
from accelerate_nb.launching.front_end import FrontEnd
from accelerate_nb.launching.launched_run import InlineRun
from accelerate_nb.launching.resource_monitor import ResourceMonitor
from accelerate_nb.launching.run_context import RunContext, Stop
from accelerate_nb.rank.stop_request import current_stop_request
from accelerate_nb.sources.cells import current_sources
from accelerate_nb.transport.outcome import failure_of
from accelerate_nb.transport.payload import FunctionCall


class AttachedWorkers(InlineWorkers):
    """A worker group that is a call in this rank's process, and in those of all others."""

    def __init__(self, call: Callable[[], Any], attached_call: AttachedCall, run_context: RunContext) -> None:
        super().__init__(call, {}, run_context)
        self._attached_call, self._rank = attached_call, attached_call.attached_rank.rank

    def follow(self) -> tuple[RankResult, ...]:
        """Call the function, and receive the reports of the others."""
        self._send_state("running")
        try:
            reports = self._attached_call.call(self._call_with_tee, self._seen)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - reported, then raised where the run is waited for
            seen = self._run_context.view.rank(self._rank).failure
            failure = seen or failure_of(error, self._rank, current_sources())
            return self._rank_results([RankReport(self._rank, failure=failure, error=error)])
        finally:
            self.stopped_at = current_stop_request().stopped_at
        for report in reports:
            for event in _events(report.seen) if report.seen is not None and report.rank != self._rank else ():
                self._run_context.take(event)
        return self._rank_results(reports)

    def _call_with_tee(self) -> Any:
        with tee_output(self._rank, self._run_context.take, self._write):
            return self._call()

    def _seen(self, failure: Failure | None) -> RankState:
        """This rank's state in its run, for the others."""
        if failure is not None:
            self._run_context.take(failure)
        self._send_state("finished" if failure is None else "stopped" if failure.ended_by_us else "failed")
        self._run_context.record.flush()
        return self._run_context.view.rank(self._rank)

    def _write(self, stream: Stream, raw: bytes, lines: list[OutputLine]) -> None:
        if raw:
            self._run_context.record.output(self._rank, raw)
        for line in lines:
            self._run_context.view.apply(LogLine(self._rank, stream, line.text, time.time(), line.open, line.meaning))

    def _send_state(self, state: State) -> None:
        self._run_context.take(StateChange(self._rank, state, time.time()))

    def _rank_results(self, reports: Sequence[RankReport]) -> tuple[RankResult, ...]:
        known = {report.rank: report.rank_result for report in reports}
        return tuple(known.get(rank, RankResult(rank)) for rank in range(self._attached_call.attached_rank.size))

    def stop(self, how: Stop) -> None:
        """Whoever started the processes stops them."""


class AttachedRun(InlineRun):
    """A run on processes that a launcher started, as the process of one rank has it: it is over when the launch returns."""

    unreached = "in processes that another launcher started. Launch from a notebook instead."

    def logs(self, rank: int) -> str:
        """All that a rank wrote through Python's streams; of one on a machine that does not share the folder, the last lines."""
        if self.log_file(rank).exists():
            return super().logs(rank)
        return "".join(f"{line.text}\n" for line in self.view.rank(rank).lines)


class _OutputRecorder(RunRecorder):
    """The record of any rank but the first, which keeps the events of all."""

    def event(self, event: Event) -> None:
        """Rank 0 keeps it."""

    def status(self, **facts: Any) -> None:
        """Rank 0 keeps it."""


def prepare_attached(
    call: FunctionCall, config: RunConfig, environ: Mapping[str, str], front_end: FrontEnd
) -> AttachedRun:
    """A run of the call in the processes that a launcher started, ready to be started; each of them has to start it."""
    attached_call = AttachedCall(environ, "all")
    attached_rank, launching_config = attached_call.attached_rank, config.launching
    parent = runs_folder(os.environ, launching_config.folder)
    folder = Path(attached_call.store.of_main("folder", lambda: str(new_folder(parent, call.name))))
    record = RunRecorder(folder) if attached_rank.rank == 0 else _OutputRecorder(folder)
    run_context = RunContext(
        view=RunState(),
        record=record,
        sources=current_sources(),
        deadline=None,
        stop_grace_period=launching_config.stop_grace_period,
        hang_warning_after=launching_config.hang_warning_after,
    )
    kind = "cpu" if launching_config.cpu else probe().kind
    wanted: Literal["main", "all"] = launching_config.results
    return AttachedRun(
        run_context=run_context,
        worker_group=lambda _: AttachedWorkers(call, attached_call, run_context),
        max_restarts=0,
        timeout=None,
        results=wanted,
        front_end=front_end,
        name=call.name,
        why=f"in the {attached_rank.size} processes that a launcher started",
        at_end=lambda _: prune(parent) if attached_rank.rank == 0 else None,
        sampler=ResourceMonitor(
            run_context.view, lambda: range(attached_rank.size), kind, os.environ, [folder, Path.cwd()]
        ),
    )


def _events(seen: RankState) -> Iterator[Event]:
    """The events of another rank, from its state in its own run."""
    yield from seen.lines
    for metrics in seen.series.values():
        yield from metrics
    yield from seen.progress.values()
    if seen.failure is not None:
        yield seen.failure
    yield StateChange(seen.rank, seen.state, time.time(), seen.detail)
