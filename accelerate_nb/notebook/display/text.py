"""The text front end of cells, terminals and pipes: every rank's lines as they come, and where the ranks are as far as it fits."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TextIO

from accelerate_nb.events.event_types import Display, cause as first_cause
from accelerate_nb.events.run_folder import shown_path
from accelerate_nb.events.run_state import RankSummary, RunState
from accelerate_nb.launching.run import FrontEnd, Run, keep_drawing
from accelerate_nb.notebook.display.text_output import LabelledLine, LineStyle, OutputWriter, TextSink
from accelerate_nb.reports.report import cause_lines, run_report
from accelerate_nb.reports.status_lines import StatusLines, StatusSchedule, status_lines, summary, undrawn
from accelerate_nb.reports.summary import SIGNS, RunFacts, cause_of

if TYPE_CHECKING:
    from rich.text import Text

_BETWEEN_STATUS = 0.25
# The most characters of each text of an error.
_ERROR = 20_000
# Terminals that can't move a cursor call themselves so.
_DUMB = frozenset({"", "dumb", "unknown"})
_STYLES: dict[str, LineStyle] = {"finished": "finished", "failed": "failed", "stopped": "stopped"}


def standard_sink(
    out: TextIO | None = None, err: TextIO | None = None, environment: Mapping[str, str] = os.environ
) -> TextSink:
    """The sink of two streams, by default this process's standard ones: a terminal that can draw, or a pipe, a file, a log."""
    out, err = out or sys.stdout, err or sys.stderr
    if sys.platform != "win32" and environment.get("TERM", "") not in _DUMB:
        if (drawn_on := next((stream for stream in (err, out) if is_terminal(stream)), None)) is not None:
            from accelerate_nb.notebook.display.live_terminal import TerminalSink

            return TerminalSink(out, err, drawn_on, has_colours=not environment.get("NO_COLOR"))
    return TextSink(out, err)


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal; a stream may be `None`, or closed."""
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):
        return False


class TextFrontEnd(FrontEnd):
    """Writes the ranks' output on a sink, within the sink's limits, a few times a second."""

    def __init__(
        self,
        new_sink: Callable[[], TextSink] = standard_sink,
        prefix_template: str | None = None,
        *,
        only_ranks: Sequence[int] | None = None,
        quiet: bool = False,
        is_command: bool = False,
        report: bool = False,
        cell_displays: Literal["main", "all"] | None = None,
        interval: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # `quiet` leaves nothing but the lines of ranks; a command of its own prints why the run failed, which others leave to their caller;
        # a session's cell labels even its only rank, and shows the figures of its first rank (`main`), or of all
        self.has_shown_failure = False
        self._new_sink = new_sink
        self._template = prefix_template
        self._only, self._is_quiet, self._is_command, self._keeps_report = only_ranks, quiet, is_command, report
        self._cell_displays = cell_displays
        self._interval, self._clock = interval, clock
        self._run: Run | None = None
        self._happenings = StatusLines()
        self._is_summed_up = self._is_followed = self._has_gone = False
        self._cursor = 0

    @property
    def shows_record_problem(self) -> bool:
        return self._is_command and self._is_summed_up

    def opened(self, run: Run) -> None:
        """The caller waits for a run from now on; one that is followed continues where it is."""
        if not self._is_followed:
            self._open(run)

    def refresh(self) -> None:
        """Write what is new; called often, it does so a few times a second."""
        if not self._is_followed:
            self._refresh()

    def closed(self) -> None:
        """Write the rest of the run: its last lines too, where the limit was reached, and how it went."""
        if not self._is_followed:
            self._close()
            if self._has_gone:
                raise BrokenPipeError("what read the lines of the run has gone")

    def follow(self, run: Run) -> None:
        """Write the run's lines under the cell that runs at this moment, until it is over; returns at once."""
        self._open(run)
        self._is_followed = True
        keep_drawing(run, self._refresh, self._close)

    def put(self, run: Run, displays: Iterable[Display]) -> None:
        """Write displays that are in no view of the run, such as values of a cell, whatever was written before."""
        self._writer(run, self._new_sink()).put(displays)

    def show(self, run: Run) -> None:
        """Show the current state of the run in the running cell, as a report."""
        facts = RunFacts.of(run, host="", background=False, can_act=False)
        self._new_sink().show(run_report(facts, run.view, live=not run.done), {})

    # ------------------------------------------------------------------------------------------------------------- steps

    def _open(self, run: Run) -> None:
        self._run, self._sink = run, self._new_sink()
        self._output = self._writer(run, self._sink)
        self._due = self._status_due = self._clock()
        self._seldom = StatusSchedule(self._due)
        self._status: list[str | Text] = []

    def _writer(self, run: Run, sink: TextSink) -> OutputWriter:
        ranks = [rank for rank in run.view.ranks if self._only is None or rank in self._only]
        is_cell = self._cell_displays is not None
        return OutputWriter(
            sink,
            run.view,
            run.folder,
            ranks=ranks,
            size=len(run.view.ranks),
            only=self._only,
            cursor=self._cursor,
            folds=is_cell or sink.folds,
            labels=is_cell or len(ranks) > 1,
            prefix_template=self._template,
            leading=ranks[0] if self._cell_displays == "main" else None,
            clock=self._clock,
        )

    def _refresh(self) -> None:
        if self._run is None or self._has_gone or self._clock() < self._due:
            return
        try:
            self._output.write()
            self._cursor = self._output.cursor
            if not self._is_quiet:
                self._show_status(self._run)
        except BrokenPipeError:
            self._leave(self._run)
        self._due = self._clock() + self._interval

    def _close(self) -> None:
        if self._run is None or self._has_gone:
            return
        try:
            self._output.write(is_last=True)
            if not self._is_quiet:
                self._note_news(self._run, self._summaries(self._run))
            self._output.finish()
            self._cursor = self._output.cursor
            self._sum_up(self._run)
            if self._keeps_report and self._run.done:
                # for those who read the notebook later; the lines and the summary are above it
                self._keeps_report = False
                facts = RunFacts.of(self._run, host="", background=False, can_act=False)
                text = f"The report of {self._run.name}"
                self._sink.show({**run_report(facts, self._run.view), "text/plain": text}, {})
        except BrokenPipeError:
            self._leave(self._run)

    def _leave(self, run: Run) -> None:
        """The reader of the pipe has gone: as any program in a pipe, the run ends."""
        self._has_gone = True
        self._sink.abandon()
        run.request_stop("interrupt")

    def _summaries(self, run: Run) -> list[RankSummary]:
        return [glance for glance in run.view.glances() if self._output.shows(glance.rank)]

    # --------------------------------------------------------------------------------------------- where the ranks are

    def _show_status(self, run: Run) -> None:
        """Show where the ranks are: below the lines, or now and then among them."""
        ranks = self._summaries(run)
        self._note_news(run, ranks)
        if not self._sink.redraws:
            lines = self._prefixed(self._seldom.lines(self._clock(), ranks, run.view.nodes))
            self._sink.write([LabelledLine("stderr", text) for text in lines])
            return
        texts = self._output.open_lines(ranks)
        if self._clock() >= self._status_due:
            self._status_due = self._clock() + _BETWEEN_STATUS
            self._status = [*self._sink.board(run, ranks, len(texts))]
            if not self._output.has_board:
                self._status = [*self._prefixed(status_lines([undrawn(rank) for rank in ranks], run.view.nodes))]
        self._sink.show_open([*texts, *self._status])

    def _note_news(self, run: Run, ranks: Sequence[RankSummary]) -> None:
        for text in self._happenings.news(run.view, ranks, time.time()):
            self._output.note(text)

    def _prefixed(self, status: Iterable[tuple[Sequence[int], str]]) -> list[str]:
        return [self._output.label(ranks) + text if ranks else text for ranks, text in status]

    # ----------------------------------------------------------------------------------------------------------- the end

    def _sum_up(self, run: Run) -> None:
        """Write how the run went, once it is over: its state, the course of each metric, and for a command why it failed."""
        view = run.view
        if self._is_summed_up or view.ended is None:
            return
        head, *metrics = summary(run)
        lines = [LabelledLine("stderr", head), *(LabelledLine("stderr", text) for text in metrics)]
        if self._is_command:
            problem = run.record_problem
            lines[0] = LabelledLine("stderr", f"{SIGNS[view.state]} {head}", _STYLES[view.state])
            lines = [*self._failure(view)] if self._is_quiet else [*lines, *self._failure(view)]
            if problem or not self._is_quiet:
                lines.append(LabelledLine("stderr", problem or f"All output: {shown_path(run.folder)}"))
        elif not metrics:
            return
        self._is_summed_up = True
        self._sink.write(lines)

    def _failure(self, view: RunState) -> Iterator[LabelledLine]:
        cause = cause_of(view.failures, _ERROR) if view.state == "failed" else None
        if cause is None:
            return
        self.has_shown_failure = True
        headline, *more = cause_lines(cause)
        yield LabelledLine("stderr", headline, "failed")
        # a program that exits has printed why; where it called sys.exit is no news
        first = first_cause(view.failures)
        if not (first.type == "SystemExit" and first.message.isdecimal()):
            yield from (LabelledLine("stderr", line) for text in more for line in text.splitlines())
        if view.detail:
            yield LabelledLine("stderr", view.detail)
