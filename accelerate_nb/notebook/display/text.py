"""The text front end of cells, terminals and pipes: every rank's lines as they come, and where the ranks are as far as it fits."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from string import Template
from typing import TYPE_CHECKING, TextIO

from accelerate_nb.config.rank_lists import named
from accelerate_nb.events.collapse import CollapsedOutput, OutputCollapser, folded
from accelerate_nb.events.model import Display, LogLine, Stream, cause as first_cause
from accelerate_nb.events.rank_state import RankSummary
from accelerate_nb.events.run_folder import shown_path
from accelerate_nb.events.run_state import RunState, Shown
from accelerate_nb.events.terminal_lines import draws_a_bar
from accelerate_nb.launching.front_end import BackgroundRefresh, RunHandle, keep_drawing
from accelerate_nb.notebook.display.message_feed import is_text
from accelerate_nb.notebook.display.text_sinks import LabelledLine, LineStyle, OutputLimits, TextSink
from accelerate_nb.reports.failure_summary import cause_of
from accelerate_nb.reports.report import cause_lines, run_report
from accelerate_nb.reports.run_info import RunFacts
from accelerate_nb.reports.status_lines import (
    StatusLines,
    StatusSchedule,
    status_lines,
    summary,
    undrawn,
)
from accelerate_nb.reports.summary import SIGNS
from accelerate_nb.reports.text_format import first_within, saved_size

if TYPE_CHECKING:
    from rich.text import Text

_PER_SWITCH = 150  # bytes with which a saved notebook surrounds an output of another stream
_OPEN_LINES, _OPEN_LINES_ABOVE_A_BOARD = 32, 8
_BETWEEN_STATUS = 0.25
# The lines times ranks that are folded in one go: more would delay the output noticeably.
_MOST_FOLDED = 60_000
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


class TextFrontEnd:
    """
    Writes the ranks' output on a sink, within the sink's limits, a few times a second.

    A line has the label of its rank where there are several, or the one that `prefix_template` makes of `role_name`, `local_rank`
    and `rank` (`string.Template`, as in torchelastic). In a terminal equal lines of all ranks stand once, and a board below the lines
    shows the ranks' state; in a cell bars and metrics stand there; in a pipe they are written now and then, on standard error.

    `only_ranks` are those whose lines are shown; all are kept in the run's folder. With `quiet` there is nothing but the lines of
    ranks. With `report`, the report of the run is shown after its lines.

    The caller of a run prints why it failed; one of which `is_command`, a program of its own, leaves that to this, and finds
    `has_shown_failure` true. Another run that logged metrics ends with a summary.

    It writes only when it is called, so its text is in the cell that waits for the run. Waiting for the same run again, in
    another cell perhaps, goes on where the last wait ended. Where the reader of the lines has gone (`| head`), the run is ended
    and `closed` raises `BrokenPipeError`.

    >>> front_end = TextFrontEnd(standard_sink)
    >>> front_end.opened(run)
    >>> front_end.refresh()
    >>> front_end.closed()
    """

    # the caller's traceback does
    shows_failure = False

    def __init__(
        self,
        new_sink: Callable[[], TextSink] = standard_sink,
        prefix_template: str | None = None,
        *,
        only_ranks: Sequence[int] | None = None,
        quiet: bool = False,
        is_command: bool = False,
        report: bool = False,
        interval: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.has_shown_failure = False
        self._new_sink = new_sink
        self._template = None if prefix_template is None else Template(prefix_template)
        self._only, self._is_quiet, self._is_command, self._keeps_report = only_ranks, quiet, is_command, report
        self._interval, self._clock = interval, clock
        self._run: RunHandle | None = None
        self._happenings = StatusLines()
        self._is_summed_up = self._is_followed = self._has_gone = False
        self._cursor = 0
        self._accounted: Counter[int] = Counter()  # lines of each rank that were written, or reported as left out
        self._seen_open: set[tuple[int, Stream]] = set()

    def opened(self, run: RunHandle) -> None:
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

    def follow(self, run: RunHandle) -> None:
        """Write the run's lines under the cell that runs at this moment, until it is over; returns at once."""
        self._open(run)
        self._is_followed = True
        keep_drawing(BackgroundRefresh(self._refresh, self._close), run)

    def show(self, run: RunHandle) -> None:
        """Show the current state of the run in the running cell, as a report."""
        facts = RunFacts.of(run, host="", background=False, can_act=False)
        self._new_sink().show(run_report(facts, run.view, live=not run.done), {})

    # ------------------------------------------------------------------------------------------------------------- steps

    def _open(self, run: RunHandle) -> None:
        self._run = run
        self._ranks = [rank for rank in run.view.ranks if self._shows(rank)]
        self._width = len(f"[{named(run.view.ranks)}] ")
        self._sink = self._new_sink()
        # a terminal's; a cell has lines of status alone
        self._has_board = self._sink.redraws and not self._sink.shows_displays
        bound = self._sink.bound
        self._lines_left, self._size_left, self._displays_left = bound.lines, bound.size, bound.displays
        self._is_full = False
        self._last_stream: Stream = "stdout"
        self._folding = OutputCollapser(self._ranks) if self._sink.folds else None
        self._due = self._status_due = self._clock()
        self._seldom = StatusSchedule(self._due)
        self._status: list[str | Text] = []

    def _refresh(self) -> None:
        if self._run is None or self._has_gone or self._clock() < self._due:
            return
        try:
            self._write_news(self._run)
            if not self._is_quiet:
                self._show_status(self._run)
        except BrokenPipeError:
            self._leave(self._run)
        self._due = self._clock() + self._interval

    def _close(self) -> None:
        if self._run is None or self._has_gone:
            return
        try:
            self._write_news(self._run, is_last=True)
            if not self._is_quiet:
                self._note_news(self._run, self._summaries(self._run))
            self._sink.show_open(())
            self._sink.write([*self._last_lines(self._run)])
            self._write_tails(self._run.view)
            self._sum_up(self._run)
            self._keep_report(self._run)
        except BrokenPipeError:
            self._leave(self._run)

    def _leave(self, run: RunHandle) -> None:
        """The reader of the pipe has gone: as any program in a pipe, the run ends."""
        self._has_gone = True
        self._sink.abandon()
        run.request_stop("interrupt")

    def _shows(self, rank: int) -> bool:
        return self._only is None or rank in self._only

    def _summaries(self, run: RunHandle) -> list[RankSummary]:
        return [glance for glance in run.view.glances() if self._shows(glance.rank)]

    # ------------------------------------------------------------------------------------------------------------- lines

    def _write_news(self, run: RunHandle, *, is_last: bool = False) -> None:
        """Write the output of the ranks since the last call."""
        news = run.view.since(self._cursor)
        self._cursor = news.cursor
        batch: list[LabelledLine] = []
        if news.skipped and not self._is_full:
            skipped = (
                f"{news.skipped:,} lines came faster than they could be shown; they are in {shown_path(run.folder)}"
            )
            batch.append(_note(skipped))
        shown = [item for item in news.shown if self._shows(item.rank)]
        for output in self._in_order(shown, is_last=is_last):
            item = output.item
            if isinstance(item, LogLine):
                if self._add(output, batch):
                    self._accounted.update(output.ranks)
            elif is_text(item) or not self._sink.shows_displays:
                self._add(output, batch)
            else:
                self._sink.write(batch)
                batch = []
                self._show(item)
        self._sink.write(batch)

    def _in_order(self, shown: Sequence[Shown], *, is_last: bool) -> Iterator[CollapsedOutput]:
        is_flood = len(shown) * len(self._ranks) > _MOST_FOLDED
        if self._folding is not None:
            if not is_flood:
                self._folding.take(shown, self._clock())
            yield from self._folding.rest() if is_last or is_flood else self._folding.ready(self._clock())
        if self._folding is None or is_flood:
            yield from (CollapsedOutput((item.rank,), item) for item in shown)

    def _add(self, output: CollapsedOutput, batch: list[LabelledLine]) -> bool:
        """Add output to what is to be written, within the limit; beyond it, a note once."""
        if self._is_full:
            return False
        lines = self._labelled(output)
        if self._sink.bound != OutputLimits():
            cost = sum(map(self._cost, lines))
            if self._lines_left < len(lines) or self._size_left < cost:
                self._is_full = True
                batch.append(_note(f"a cell holds no more; all lines of each rank are in {self._folder}"))
                return False
            self._lines_left -= len(lines)
            self._size_left -= cost
        batch.extend(lines)
        return True

    @property
    def _folder(self) -> str:
        assert self._run is not None
        return shown_path(self._run.folder)

    def _cost(self, line: LabelledLine) -> int:
        """The bytes that a line takes in a saved notebook."""
        switch = 0 if line.stream == self._last_stream else _PER_SWITCH
        self._last_stream = line.stream
        return saved_size(line.label + line.text) + switch

    def _labelled(self, output: CollapsedOutput) -> list[LabelledLine]:
        """Output as lines with their label; a line of nothing but cursor movements is none."""
        item, label = output.item, self._label(output.ranks)
        if isinstance(item, LogLine):
            text = self._sink.clean(item.text, item.stream)
            return [LabelledLine(item.stream, text, item.meaning, label, output.ranks)] if text or not item.text else []
        parts = str(item.data.get("text/plain", f"<{', '.join(item.data)}>")).splitlines()
        return [LabelledLine("stdout", self._sink.clean(part, "stdout"), "", label, output.ranks) for part in parts]

    def _label(self, ranks: Sequence[int]) -> str:
        name = named(ranks)
        if self._template is not None:
            return self._template.safe_substitute(role_name="default", local_rank=name, rank=name)
        if len(self._ranks) == 1:
            return ""
        return f"[{name}] ".ljust(self._width) if self._sink.folds else f"[{name}] "

    def _show(self, display: Display) -> None:
        """Show something rich under its rank's label."""
        if self._displays_left < 1:
            return
        self._displays_left -= 1
        self._sink.write([LabelledLine("stdout", self._label([display.rank]).rstrip())])
        self._sink.show(display.data, display.metadata)
        if self._displays_left < 1:
            self._sink.write([_note(f"a cell shows no more; the other displays are in {self._folder}")])

    def _last_lines(self, run: RunHandle) -> Iterator[LabelledLine]:
        """The lines that have not ended; a bar that a board has shown is known by what follows it."""
        bars = {rank.rank: [*rank.progress.values()] for rank in run.view.glances()}
        last = [line for line in run.view.open_lines() if self._shows(line.rank)]
        for output in self._folded(
            [line for line in last if not (self._has_board and draws_a_bar(line, bars[line.rank]))]
        ):
            yield from self._labelled(output)

    def _write_tails(self, view: RunState) -> None:
        """The last lines of each rank of which not all were written, where the limit was reached."""
        bound = self._sink.bound
        size_limit = bound.tail_size // max(len(view.ranks), 1)
        for rank in view.ranks if self._is_full else ():
            missing = view.line_count_of(rank) - self._accounted[rank]
            tail = [
                line
                for item in view.tail(rank, min(missing, bound.tail_lines))
                for line in self._labelled(CollapsedOutput((rank,), item))
            ]
            newest = first_within(
                reversed(tail), size_limit, lambda line: saved_size(line.label + line.text) + _PER_SWITCH
            )
            if left_out := missing - len(newest):
                text = f"... {left_out:,} lines are only in {self._folder} ..."
                self._sink.write([LabelledLine("stdout", text, "", self._label([rank]), (rank,))])
            self._sink.write(newest[::-1])
            self._accounted[rank] += missing

    # --------------------------------------------------------------------------------------------- where the ranks are

    def _show_status(self, run: RunHandle) -> None:
        """Show where the ranks are: below the lines, or now and then among them."""
        ranks = self._summaries(run)
        self._note_news(run, ranks)
        if not self._sink.redraws:
            lines = self._prefixed(self._seldom.lines(self._clock(), ranks, run.view.nodes))
            self._sink.write([LabelledLine("stderr", text) for text in lines])
            return
        texts = self._open_lines(ranks)
        if self._clock() >= self._status_due:
            self._status_due = self._clock() + _BETWEEN_STATUS
            self._status = [*self._sink.board(run, ranks, len(texts))]
            if not self._has_board:
                self._status = [*self._prefixed(status_lines([undrawn(rank) for rank in ranks], run.view.nodes))]
        self._sink.show_open([*texts, *self._status])

    def _open_lines(self, ranks: Sequence[RankSummary]) -> list[str]:
        """The lines that were open a moment ago already: what only waits for its newline is no progress bar."""
        lines = [(rank, line) for rank in ranks for line in rank.open_lines]
        # a board shows the bars
        now = [line for rank, line in lines if not (self._has_board and draws_a_bar(line, rank.progress.values()))]
        lasting = [line for line in now if (line.rank, line.stream) in self._seen_open]
        self._seen_open = {(line.rank, line.stream) for line in now}
        texts = [line.label + line.text for output in self._folded(lasting) for line in self._labelled(output)]
        most = _OPEN_LINES_ABOVE_A_BOARD if self._has_board else _OPEN_LINES
        if len(texts) > most:
            texts[most:] = [f"... and {len(texts) - most} more"]
        return texts

    def _folded(self, lines: Sequence[LogLine]) -> list[CollapsedOutput]:
        return folded(lines) if self._sink.folds else [CollapsedOutput((line.rank,), line) for line in lines]

    def _note_news(self, run: RunHandle, ranks: Sequence[RankSummary]) -> None:
        self._sink.write([_note(text) for text in self._happenings.news(run.view, ranks, time.time())])

    def _prefixed(self, status: Iterable[tuple[int | None, str]]) -> list[str]:
        return [text if rank is None else self._label([rank]) + text for rank, text in status]

    # ----------------------------------------------------------------------------------------------------------- the end

    def _sum_up(self, run: RunHandle) -> None:
        """Write how the run went, once it is over: its state, the course of each metric, and for a command why it failed."""
        view = run.view
        if self._is_summed_up or view.ended is None:
            return
        head, *metrics = summary(run)
        lines = [LabelledLine("stderr", head), *(LabelledLine("stderr", text) for text in metrics)]
        if self._is_command:
            place = LabelledLine("stderr", f"All output: {self._folder}")
            lines[0] = LabelledLine("stderr", f"{SIGNS[view.state]} {head}", _STYLES[view.state])
            lines = [*self._failure(view)] if self._is_quiet else [*lines, *self._failure(view), place]
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

    def _keep_report(self, run: RunHandle) -> None:
        """Show the report of a run that is over, once, for those who read the notebook later."""
        if not self._keeps_report or not run.done:
            return
        self._keeps_report = False
        made = run_report(RunFacts.of(run, host="", background=False, can_act=False), run.view)
        # the lines and the summary are above it
        self._sink.show({**made, "text/plain": f"The report of {run.name}"}, {})


def _note(text: str) -> LabelledLine:
    """A message about the run, among the lines of its ranks."""
    return LabelledLine("stderr", f"... {text} ...")
