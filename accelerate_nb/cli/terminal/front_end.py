"""The display of `accelerate-nb launch`: every rank's lines, and in a terminal the state of each rank below them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from string import Template

from accelerate_nb.cli.terminal.status_board import StatusBoard, dyed
from accelerate_nb.config.rank_lists import named
from accelerate_nb.events.collapse import CollapsedOutput, OutputCollapser, folded
from accelerate_nb.events.first_cause import cause as first_cause
from accelerate_nb.events.model import LogLine, Meaning, Stream
from accelerate_nb.events.rank_state import RankSummary
from accelerate_nb.events.run_folder import shown_path
from accelerate_nb.events.run_state import RunState, Shown
from accelerate_nb.events.terminal_lines import cleaned, coloured, draws_a_bar, plain, within
from accelerate_nb.launching.background_refresh import BackgroundRefresh, keep_drawing
from accelerate_nb.launching.front_end import RunHandle
from accelerate_nb.reports.failure_summary import cause_of
from accelerate_nb.reports.report import cause_lines
from accelerate_nb.reports.standard_streams import LabelledLine, StandardStreams
from accelerate_nb.reports.status_lines import StatusLines, StatusSchedule, head_of, metric_lines
from accelerate_nb.reports.summary import SIGNS

_INTERVAL, _BETWEEN_DRAWINGS = 0.1, 0.25
_OPEN_LINES = 8
# The lines times ranks that are folded in one go: more would delay the output noticeably.
_MOST_FOLDED = 60_000
# The most characters of each text of an error.
_ERROR = 20_000
_COLOURS: dict[Meaning, int] = {"bar": 2, "warning": 33, "error": 31}
_END_COLOURS = {"finished": 32, "failed": 31, "stopped": 33}


def terminal(
    *, only_ranks: tuple[int, ...] | None = None, prefix_template: str | None = None, quiet: bool = False
) -> TerminalFrontEnd:
    """
    The front end for this process's standard streams.

    `only_ranks` are those whose lines are shown; all are kept in the run's folder. `prefix_template` is the prefix of
    a line (`string.Template` of `role_name`, `local_rank`, `rank`); without it a line has its rank's label where there are
    several. With `quiet` there is nothing but the lines of ranks, and of a run that failed the cause.

    The cause of a failure is printed as soon as the run is over: the caller prints no more of a `WorkerError` where
    `has_shown_failure` is true. Where the reader of the lines has gone (`| head`), the run is ended and `wait` raises
    `BrokenPipeError`.

    >>> front_end = terminal(only_ranks=(0,))
    """
    return TerminalFrontEnd(
        StandardStreams(sys.stdout, sys.stderr, os.environ), only_ranks, prefix_template, is_quiet=quiet
    )


class TerminalFrontEnd:
    """
    Writes the ranks' output to the streams of the same name, and messages about the run to standard error.

    In a terminal equal lines of all ranks are printed once, and below the lines is a board of the ranks' state. Elsewhere every
    line is written as it comes, without colours, and the ranks' state is printed now and then.
    """

    # the caller's traceback does
    shows_failure = False

    def __init__(
        self,
        streams: StandardStreams,
        only: Sequence[int] | None = None,
        prefix_template: str | None = None,
        *,
        is_quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.has_shown_failure = False
        self._streams, self._only, self._is_quiet, self._clock = streams, only, is_quiet, clock
        self._template = None if prefix_template is None else Template(prefix_template)
        self._folds = all(streams.is_terminal(stream) for stream in ("stdout", "stderr"))
        self._run: RunHandle | None = None
        self._has_gone = False
        self._cursor = 0
        self._due = self._board_due = clock()
        self._drawn: list[str] = []
        self._seen_open: set[tuple[int, Stream]] = set()
        self._happenings, self._seldom = StatusLines(), StatusSchedule(clock())

    def opened(self, run: RunHandle) -> None:
        """The caller waits for the run from now on."""
        self._run = run
        self._ranks = [rank for rank in run.view.ranks if self._only is None or rank in self._only]
        self._width = len(f"[{named(run.view.ranks)}] ")
        self._folding = OutputCollapser(self._ranks)
        self._board = StatusBoard(has_colours=self._streams.has_colours) if self._streams.draws else None

    def refresh(self) -> None:
        """Write what is new; called often, it does so a few times a second."""
        if self._run is None or self._has_gone or self._clock() < self._due:
            return
        try:
            self._refresh(self._run)
        except BrokenPipeError:
            self._leave(self._run)
        self._due = self._clock() + _INTERVAL

    def closed(self) -> None:
        """Write what is left of the run, and how it went."""
        if self._run is None:
            return
        if not self._has_gone:
            try:
                self._close(self._run)
            except BrokenPipeError:
                self._leave(self._run)
        if self._has_gone:
            raise BrokenPipeError("what read the lines of the run has gone")

    def follow(self, run: RunHandle) -> None:
        """Show the run until it is over; returns at once."""
        self.opened(run)
        keep_drawing(BackgroundRefresh(self.refresh, self.closed), run)

    def show(self, run: RunHandle) -> None:
        """The state of the run in one line."""
        self._streams.write([LabelledLine("stdout", repr(run))])

    def _leave(self, run: RunHandle) -> None:
        """The reader of the pipe has gone: as any program in a pipe, the run ends."""
        self._has_gone = True
        self._streams.abandon()
        run.request_stop("interrupt")

    # --------------------------------------------------------------------------------------------------------- lines

    def _refresh(self, run: RunHandle) -> None:
        lines = [*self._new(run, is_last=False)]
        ranks = [glance for glance in run.view.glances() if glance.rank in self._ranks]
        if not self._is_quiet:
            lines += self._news(run, ranks)
            if self._board is None:
                lines += [
                    LabelledLine("stderr", text if rank is None else self._label([rank], "stderr") + text)
                    for rank, text in self._seldom.lines(self._clock(), ranks, run.view.nodes)
                ]
        self._streams.write(lines, self._below(run, ranks))

    def _news(self, run: RunHandle, ranks: Sequence[RankSummary]) -> list[LabelledLine]:
        news = self._happenings.news(run.view, ranks, time.time())
        return [LabelledLine("stderr", f"... {text} ...") for text in news]

    def _close(self, run: RunHandle) -> None:
        lines = [*self._new(run, is_last=True), *(() if self._is_quiet else self._news(run, ()))]
        last = [line for line in run.view.open_lines() if line.rank in self._ranks]
        # a finished bar is known by what follows it
        bars = {glance.rank: [*glance.progress.values()] for glance in run.view.glances()}
        kept = [line for line in last if self._board is None or not draws_a_bar(line, bars[line.rank])]
        outputs = folded(kept) if self._folds else [CollapsedOutput((line.rank,), line) for line in kept]
        lines += [made for item in outputs for made in self._lines(item)]
        self._streams.write(lines, ())
        self._streams.write([*self._summary(run)])

    def _new(self, run: RunHandle, *, is_last: bool) -> Iterator[LabelledLine]:
        """The output of the ranks since the last call."""
        news = run.view.since(self._cursor)
        self._cursor = news.cursor
        if news.skipped:
            text = f"... {news.skipped:,} lines came faster than they could be shown; they are in {shown_path(run.folder)} ..."
            yield LabelledLine("stderr", text)
        shown = [item for item in news.shown if item.rank in self._ranks]
        for item in self._in_order(shown, is_last=is_last):
            yield from self._lines(item)

    def _in_order(self, shown: Sequence[Shown], *, is_last: bool) -> Iterator[CollapsedOutput]:
        if not self._folds:
            yield from (CollapsedOutput((item.rank,), item) for item in shown)
            return
        is_flood = len(shown) * len(self._ranks) > _MOST_FOLDED
        if not is_flood:
            self._folding.take(shown, self._clock())
        yield from self._folding.rest() if is_last or is_flood else self._folding.ready(self._clock())
        if is_flood:
            yield from (CollapsedOutput((item.rank,), item) for item in shown)

    def _lines(self, collapsed_output: CollapsedOutput) -> Iterator[LabelledLine]:
        item = collapsed_output.item
        if isinstance(item, LogLine):
            text = self._clean(item.text, item.stream)
            # a line of nothing but cursor movements is no line
            if self._streams.has_colours and self._streams.is_terminal(item.stream):
                text = coloured(text, _COLOURS.get(item.meaning))
            if text or not item.text:
                yield LabelledLine(item.stream, self._label(collapsed_output.ranks, item.stream) + text)
            return
        text = str(item.data.get("text/plain", f"<{', '.join(item.data)}>"))
        for part in text.splitlines():
            yield LabelledLine("stdout", self._label(collapsed_output.ranks, "stdout") + self._clean(part, "stdout"))

    def _clean(self, text: str, stream: Stream) -> str:
        return cleaned(text, None) if self._streams.is_terminal(stream) else plain(text)

    def _label(self, ranks: Sequence[int], stream: Stream) -> str:
        name = named(ranks)
        if self._template is not None:
            label = self._template.safe_substitute(role_name="default", local_rank=name, rank=name)
        elif len(self._ranks) == 1:
            return ""
        else:
            label = f"[{name}] ".ljust(self._width) if self._folds else f"[{name}] "
        return dyed(label, ranks) if self._streams.has_colours and self._streams.is_terminal(stream) else label

    # ------------------------------------------------------------------------------------------------- below the lines

    def _below(self, run: RunHandle, ranks: Sequence[RankSummary]) -> list[str]:
        """The text below the lines: unfinished lines, and the board."""
        if self._board is None or self._is_quiet or self._clock() < self._board_due:
            return self._drawn
        self._board_due = self._clock() + _BETWEEN_DRAWINGS
        columns, rows = self._streams.size
        texts = self._open(ranks, columns)
        row_limit = max(rows - 1 - len(texts), 1)
        seconds = time.time() - run.started
        board = self._board.lines(
            run.name, seconds, ranks, run.view.host, run.view.nodes, columns=columns, rows=row_limit
        )
        self._drawn = [*texts, *board]
        return self._drawn

    def _open(self, ranks: Sequence[RankSummary], columns: int) -> list[str]:
        """The lines that were open a moment ago already, but for those that the board shows as bars."""
        now = [
            line
            for rank in ranks
            for line in rank.open_lines
            if not draws_a_bar(line, rank.progress.values()) and line.text
        ]
        lasting: list[LogLine] = [line for line in now if (line.rank, line.stream) in self._seen_open]
        self._seen_open = {(line.rank, line.stream) for line in now}
        texts = [
            within(f"[{named(item.ranks)}] {plain(item.item.text)}", columns - 1)
            for item in folded(lasting)
            if isinstance(item.item, LogLine)
        ]
        more = [f"... and {len(texts) - _OPEN_LINES} more"] if len(texts) > _OPEN_LINES else []
        return [*texts[:_OPEN_LINES], *more]

    def _summary(self, run: RunHandle) -> Iterator[LabelledLine]:
        """The summary of a run that has ended: its state and time, the course of each metric, the cause of a failure."""
        view = run.view
        if view.ended is None:
            return
        cause = cause_of(view.failures, _ERROR) if view.state == "failed" else None
        self.has_shown_failure = cause is not None
        if not self._is_quiet:
            ranks = [view.rank(rank) for rank in view.ranks]
            yield self._styled(f"{SIGNS[view.state]} {head_of(run, ranks)}", _END_COLOURS[view.state])
            yield from map(self._styled, metric_lines(ranks))
        if cause is not None:
            headline, *more = cause_lines(cause)
            yield self._styled(headline, _END_COLOURS["failed"])
            # a program that exits has printed why; where it called sys.exit is no news
            if not _exited_by_itself(view):
                yield from (self._styled(line) for text in more for line in text.splitlines())
            if view.detail:
                yield self._styled(view.detail)
        if not self._is_quiet:
            yield self._styled(f"All output: {shown_path(run.folder)}")

    def _styled(self, text: str, colour: int = 0) -> LabelledLine:
        """A line about the run; in a terminal bold, and in its colour."""
        is_dyed = colour and self._streams.has_colours and self._streams.is_terminal("stderr")
        return LabelledLine("stderr", f"\x1b[1;{colour}m{text}\x1b[0m" if is_dyed else text)


def _exited_by_itself(view: RunState) -> bool:
    """Whether the program ended itself with a code (`sys.exit(2)`), and did not fail."""
    first = first_cause(view.failures)
    return first.type == "SystemExit" and first.message.isdecimal()
