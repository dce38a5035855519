"""The plain-text front end: every rank's lines with its label as they come, its bars and metrics where they fit."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from string import Template

from accelerate_nb.events.model import Display, LogLine, Stream
from accelerate_nb.events.rank_state import RankSummary
from accelerate_nb.events.run_folder import shown_path
from accelerate_nb.events.run_state import RunState
from accelerate_nb.events.terminal_lines import cleaned
from accelerate_nb.launching.background_refresh import BackgroundRefresh, keep_drawing
from accelerate_nb.launching.front_end import RunHandle
from accelerate_nb.notebook.display.message_feed import is_text, text_lines
from accelerate_nb.notebook.display.text_sinks import TextSink
from accelerate_nb.reports.report import run_report
from accelerate_nb.reports.run_info import RunFacts
from accelerate_nb.reports.standard_streams import LabelledLine
from accelerate_nb.reports.status_lines import StatusLines, StatusSchedule, status_lines, summary, undrawn
from accelerate_nb.reports.text_format import first_within, saved_size

_PER_SWITCH = 150  # bytes with which a saved notebook surrounds an output of another stream
_OPEN_LINES = 32
_BETWEEN_STATUS = 0.3


class PlainText:
    """
    Writes the ranks' output on a screen, within the screen's limits, a few times a second.

    A rank's line has the prefix `[rank] `, or the one that `prefix_template` makes of `role_name`, `local_rank` and `rank`
    (`string.Template`, as in torchelastic). It writes only when it is called, so its text is in the cell that waits for the run.

    Bars and metrics stand below the lines where a screen can draw over them; in a log they are written now and then. A run
    that logged metrics ends with a summary; one that has neither metrics nor bars shows its lines and nothing else.

    With `report`, the report of the run is shown after its lines.

    Waiting for the same run again, in another cell perhaps, goes on where the last wait ended.

    >>> front_end = PlainText(Pipe)
    >>> front_end.opened(run)
    >>> front_end.refresh()
    >>> front_end.closed()
    """

    # the caller's traceback does
    shows_failure = False

    def __init__(
        self,
        new_screen: Callable[[], TextSink],
        prefix_template: str | None = None,
        *,
        report: bool = False,
        interval: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._new_screen = new_screen
        self._template = Template("[$rank] " if prefix_template is None else prefix_template)
        self._keeps_report = report
        self._interval = interval
        self._clock = clock
        self._due = clock()
        self._run: RunHandle | None = None
        self._view: RunState | None = None
        self._folder = Path()
        self._happenings = StatusLines()
        self._is_summed_up = self._is_followed = False
        self._cursor = 0
        self._accounted: Counter[int] = Counter()  # lines of each rank that were written, or reported as left out
        self._seen_open: set[tuple[int, Stream]] = set()
        self._begin_screen()

    def _begin_screen(self) -> None:
        self._screen = self._new_screen()
        self._lines_left = self._screen.bound.lines
        self._size_left = self._screen.bound.size
        self._displays_left = self._screen.bound.displays
        self._is_full = False
        self._last_stream: Stream = "stdout"
        self._seldom = StatusSchedule(self._clock())
        self._status: list[str] = []
        self._status_due = self._clock()

    def opened(self, run: RunHandle) -> None:
        """The caller waits for a run from now on; one that is followed continues where it is."""
        if not self._is_followed:
            self._open(run)

    def _open(self, run: RunHandle) -> None:
        self._run = run
        self._view = run.view
        self._folder = run.folder
        self._begin_screen()

    def refresh(self) -> None:
        """Write what is new; called often, it does so a few times a second."""
        if not self._is_followed:
            self._refresh()

    def _refresh(self) -> None:
        if self._view is None or self._clock() < self._due:
            return
        self._write(self._view)
        self._show_status(self._view)
        self._due = self._clock() + self._interval

    def closed(self) -> None:
        """Write the rest of the run: its last lines too, where the limit was reached."""
        if not self._is_followed:
            self._close()

    def _close(self) -> None:
        if self._view is None:
            return
        self._write(self._view)
        self._note_news(self._view, self._view.glances())
        self._screen.show_open(())
        self._screen.write(self._labelled(self._view.open_lines()))
        if self._is_full:
            self._write_tails(self._view)
        self._sum_up()
        self._keep_report()

    def follow(self, run: RunHandle) -> None:
        """Write the run's lines under the cell that runs at this moment, until it is over; returns at once."""
        self._open(run)
        self._is_followed = True
        keep_drawing(BackgroundRefresh(self._refresh, self._close), run)

    def show(self, run: RunHandle) -> None:
        """Show the current state of the run in the running cell, as a report."""
        facts = RunFacts.of(run, host="", background=False, can_act=False)
        self._new_screen().show(run_report(facts, run.view, live=not run.done), {})

    # --------------------------------------------------------------------------------------------------------- lines

    def _write(self, view: RunState) -> None:
        news = view.since(self._cursor)
        self._cursor = news.cursor
        if news.skipped and not self._is_full:
            self._note(
                f"{news.skipped:,} lines came faster than they could be shown; they are in {shown_path(self._folder)}"
            )
        lines: list[LabelledLine] = []
        for item in news.shown:
            if isinstance(item, LogLine):
                self._accounted[item.rank] += self._add([item], lines)
            elif is_text(item):
                self._add(text_lines(item), lines)
            else:
                self._screen.write(lines)
                lines = []
                self._show(item)
        self._screen.write(lines)

    def _note(self, text: str) -> None:
        self._screen.write([LabelledLine("stdout", f"... {text} ...")])

    def _add(self, lines: Iterable[LogLine], batch: list[LabelledLine]) -> bool:
        """Add lines to those to be written, within the limit; beyond it, write a note once."""
        if self._is_full:
            return False
        labelled = self._labelled(lines)
        cost = sum(map(self._cost, labelled))
        if self._lines_left < len(labelled) or self._size_left < cost:
            self._is_full = True
            text = f"... a cell holds no more; all lines of each rank are in {shown_path(self._folder)} ..."
            batch.append(LabelledLine("stdout", text))
            return False
        self._lines_left -= len(labelled)
        self._size_left -= cost
        batch.extend(labelled)
        return True

    def _cost(self, line: LabelledLine) -> int:
        """The bytes that a line takes in a saved notebook."""
        switch = 0 if line.stream == self._last_stream else _PER_SWITCH
        self._last_stream = line.stream
        return saved_size(line.text) + switch

    def _labelled(self, lines: Iterable[LogLine]) -> list[LabelledLine]:
        """Lines as they are written: labelled, cut to the screen's width, without what would disturb others."""
        clean = ((line, cleaned(line.text, self._screen.bound.width)) for line in lines)
        # a line of nothing but cursor movements is no line
        return [
            LabelledLine(line.stream, self._label(line.rank) + text, line.meaning)
            for line, text in clean
            if text or not line.text
        ]

    def _label(self, rank: int) -> str:
        return self._template.safe_substitute(role_name="default", local_rank=rank, rank=rank)

    def _write_tails(self, view: RunState) -> None:
        """The last lines of each rank of which not all were written."""
        size_limit = self._screen.bound.tail_size // max(len(view.ranks), 1)
        for rank in view.ranks:
            missing = view.line_count_of(rank) - self._accounted[rank]
            tail = self._fitting(view.tail(rank, min(missing, self._screen.bound.tail_lines)), size_limit)
            if left_out := missing - len(tail):
                text = f"{self._label(rank)}... {left_out:,} lines are only in {shown_path(self._folder)} ..."
                tail.insert(0, LabelledLine("stdout", text))
            self._screen.write(tail)
            self._accounted[rank] += missing

    def _fitting(self, lines: tuple[LogLine, ...], size_limit: int) -> list[LabelledLine]:
        """The newest of these lines that fit into the limit, in bytes of a saved notebook."""
        newest = reversed(self._labelled(lines))
        return first_within(newest, size_limit, lambda line: saved_size(line.text) + _PER_SWITCH)[::-1]

    # ---------------------------------------------------------------------------------------- lines that have not ended

    def _show_status(self, view: RunState) -> None:
        """Show where the ranks are: below the lines, or now and then among them."""
        ranks = view.glances()
        self._note_news(view, ranks)
        if not self._screen.redraws:
            seldom = self._prefixed(self._seldom.lines(self._clock(), ranks, view.nodes))
            self._screen.write([LabelledLine("stdout", text) for text in seldom])
            return
        if self._clock() >= self._status_due:
            self._status = self._prefixed(status_lines([undrawn(rank) for rank in ranks], view.nodes))
            self._status_due = self._clock() + _BETWEEN_STATUS
        self._draw_open(ranks)

    def _note_news(self, view: RunState, ranks: Sequence[RankSummary]) -> None:
        for news in self._happenings.news(view, ranks, time.time()):
            self._note(news)

    def _prefixed(self, status: Iterable[tuple[int | None, str]]) -> list[str]:
        return [text if rank is None else self._label(rank) + text for rank, text in status]

    def _sum_up(self) -> None:
        """Write the summary of the run, once."""
        if self._run is None or self._is_summed_up:
            return
        lines = summary(self._run)
        self._is_summed_up = bool(lines)
        self._screen.write([LabelledLine("stdout", line) for line in lines])

    def _keep_report(self) -> None:
        """Show the report of a run that is over, once, for those who read the notebook later."""
        if not self._keeps_report or self._run is None or not self._run.done:
            return
        facts = RunFacts.of(self._run, host="", background=False, can_act=False)
        made = run_report(facts, self._run.view)
        self._keeps_report = False
        # the lines and the summary are above it
        self._screen.show({**made, "text/plain": f"The report of {self._run.name}"}, {})

    def _draw_open(self, ranks: Sequence[RankSummary]) -> None:
        """Show the lines that were open a moment ago already: what only waits for its newline is no progress bar."""
        now = [line for rank in ranks for line in rank.open_lines]
        lasting = [line for line in now if (line.rank, line.stream) in self._seen_open]
        self._seen_open = {(line.rank, line.stream) for line in now}
        texts = [line.text for line in self._labelled(lasting)]
        if len(texts) > _OPEN_LINES:
            texts[_OPEN_LINES:] = [f"... and {len(texts) - _OPEN_LINES} more"]
        self._screen.show_open([*texts, *self._status])

    # ------------------------------------------------------------------------------------------------------- displays

    def _show(self, display: Display) -> None:
        """Show something rich under its rank's label."""
        if self._displays_left < 1:
            return
        self._displays_left -= 1
        self._screen.write([LabelledLine("stdout", self._label(display.rank).rstrip())])
        self._screen.show(display.data, display.metadata)
        if self._displays_left < 1:
            self._note(f"a cell shows no more; the other displays are in {shown_path(self._folder)}")
