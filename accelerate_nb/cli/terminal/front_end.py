"""What `accelerate-nb launch` shows of a run: every rank's lines, and in a terminal where each rank is below them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from string import Template

from accelerate_nb.cli.board import Board, dyed
from accelerate_nb.cli.streams import Line, Streams
from accelerate_nb.config.ranks import named
from accelerate_nb.events.bars import draws_a_bar
from accelerate_nb.events.causes import cause as first_cause
from accelerate_nb.events.folding import Folded, Folding, folded
from accelerate_nb.events.lines import cleaned, is_drawn_over, within
from accelerate_nb.events.model import LogLine, Stream
from accelerate_nb.events.view import Glance, RunView, Shown
from accelerate_nb.launching.following import ByItself, keep_drawing
from accelerate_nb.launching.run import Watched
from accelerate_nb.reports.colours import plain
from accelerate_nb.reports.digest import SIGNS
from accelerate_nb.reports.failures import cause_of
from accelerate_nb.reports.status import Happenings, Seldom, head_of, metric_lines
from accelerate_nb.reports.wording import cause_lines

_INTERVAL, _BETWEEN_DRAWINGS = 0.1, 0.25
_OPEN_LINES = 8
# What is folded in one go, in lines times ranks: more would take longer than a person waits for a line.
_MOST_FOLDED = 60_000
# The most characters of each text of an error.
_ERROR = 20_000
_END_COLOURS = {"finished": 32, "failed": 31, "stopped": 33}


def terminal(
    *,
    only_ranks: tuple[int, ...] | None = None,
    prefix_template: str | None = None,
    quiet: bool = False,
) -> Terminal:
    """
    The front end for this process's standard streams.

    `only_ranks` are those whose lines are shown; all are kept in the run's folder. `prefix_template` is what stands before
    a line (`string.Template` of `role_name`, `local_rank`, `rank`); without it a line has its rank's label where there are
    several. With `quiet` there is nothing but the lines of ranks, and of a run that failed the cause.

    The cause of a failure is told as soon as the run is over: who waits for the run says no more of a `WorkerError` where
    `has_told_failure` is true. Where the reader of the lines has gone (`| head`), the run is ended and `wait` raises
    `BrokenPipeError`.

    >>> front_end = terminal(only_ranks=(0,))
    """
    return Terminal(Streams(sys.stdout, sys.stderr, os.environ), only_ranks, prefix_template, is_quiet=quiet)


class Terminal:
    """
    Writes what ranks write on the streams of the same name, and what is to be said of the run on standard error.

    In a terminal equal lines of all ranks stand once, and below the lines is a board of where the ranks are. Elsewhere every
    line is written as it comes, without colours, and where the ranks are is said now and then.
    """

    def __init__(
        self,
        streams: Streams,
        only: Sequence[int] | None = None,
        prefix_template: str | None = None,
        *,
        is_quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.has_told_failure = False
        self._streams, self._only, self._is_quiet, self._clock = streams, only, is_quiet, clock
        self._template = None if prefix_template is None else Template(prefix_template)
        self._folds = all(streams.is_terminal(stream) for stream in ("stdout", "stderr"))
        self._run: Watched | None = None
        self._has_gone = False
        self._cursor = 0
        self._due = self._board_due = clock()
        self._drawn: list[str] = []
        self._seen_open: set[tuple[int, Stream]] = set()
        self._happenings, self._seldom = Happenings(), Seldom(clock())

    def opened(self, run: Watched) -> None:
        """Somebody waits for the run from now on."""
        self._run = run
        self._ranks = [rank for rank in run.view.ranks if self._only is None or rank in self._only]
        self._width = len(f"[{named(run.view.ranks)}] ")
        self._folding = Folding(self._ranks)
        self._board = Board(has_colours=self._streams.has_colours) if self._streams.draws else None

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

    def follow(self, run: Watched) -> None:
        """Show the run until it is over; returns at once."""
        self.opened(run)
        keep_drawing(ByItself(self.refresh, self.closed), run)

    def show(self, run: Watched) -> None:
        """Say in one line how the run is."""
        self._streams.write([Line("stdout", repr(run))])

    def _leave(self, run: Watched) -> None:
        """Nobody reads any more: as any program in a pipe, the run ends."""
        self._has_gone = True
        self._streams.abandon()
        run.ask("interrupt")

    # --------------------------------------------------------------------------------------------------------- lines

    def _refresh(self, run: Watched) -> None:
        lines = [*self._new(run, is_last=False)]
        ranks = [one for one in run.view.glances() if one.rank in self._ranks]
        if not self._is_quiet:
            lines += [Line("stderr", f"... {text} ...") for text in self._happenings.news(run.view, ranks, time.time())]
            if self._board is None:
                lines += self._told(self._seldom.lines(self._clock(), ranks))
        self._streams.write(lines, self._below(run, ranks))

    def _close(self, run: Watched) -> None:
        lines = [*self._new(run, is_last=True)]
        last = [line for line in run.view.open_lines() if line.rank in self._ranks]
        # a bar that has come to its end is told by what follows it
        bars = {one.rank: [*one.progress.values()] for one in run.view.glances()}
        kept = [line for line in last if self._board is None or not draws_a_bar(line, bars[line.rank])]
        lines += [made for one in self._folded(kept) for made in self._lines(one)]
        self._streams.write(lines, ())
        self._streams.write([*self._summary(run)])

    def _new(self, run: Watched, *, is_last: bool) -> Iterator[Line]:
        """What ranks have written and shown since the last time."""
        news = run.view.since(self._cursor)
        self._cursor = news.cursor
        if news.skipped:
            yield Line(
                "stderr",
                f"... {news.skipped:,} lines came faster than they could be shown; they are in {run.folder} ...",
            )
        shown = [one for one in news.shown if one.rank in self._ranks]
        for one in self._in_order(shown, is_last=is_last):
            yield from self._lines(one)

    def _in_order(self, shown: Sequence[Shown], *, is_last: bool) -> Iterator[Folded]:
        if not self._folds:
            yield from (Folded((one.rank,), one) for one in shown)
            return
        is_flood = len(shown) * len(self._ranks) > _MOST_FOLDED
        if not is_flood:
            self._folding.take(shown, self._clock())
        yield from self._folding.rest() if is_last or is_flood else self._folding.ready(self._clock())
        if is_flood:
            yield from (Folded((one.rank,), one) for one in shown)

    def _folded(self, lines: Iterable[LogLine]) -> list[Folded]:
        return folded(lines) if self._folds else [Folded((line.rank,), line) for line in lines]

    def _lines(self, one: Folded) -> Iterator[Line]:
        item = one.item
        if isinstance(item, LogLine):
            text = self._clean(item.text, item.stream)
            # a line of nothing but cursor movements is no line
            if not is_drawn_over(item) and (text or not item.text):
                yield Line(item.stream, self._label(one.ranks, item.stream) + text)
            return
        told = str(item.data.get("text/plain", f"<{', '.join(item.data)}>"))
        for part in told.splitlines():
            yield Line("stdout", self._label(one.ranks, "stdout") + self._clean(part, "stdout"))

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

    def _below(self, run: Watched, ranks: Sequence[Glance]) -> list[str]:
        """What stands below the lines: those that have not ended, and the board."""
        if self._board is None or self._is_quiet or self._clock() < self._board_due:
            return self._drawn
        self._board_due = self._clock() + _BETWEEN_DRAWINGS
        columns, rows = self._streams.size
        texts = self._open(ranks, columns)
        room = max(rows - 1 - len(texts), 1)
        seconds = time.time() - run.started
        board = self._board.lines(run.name, seconds, ranks, run.view.host, columns=columns, rows=room)
        self._drawn = [*texts, *board]
        return self._drawn

    def _open(self, ranks: Sequence[Glance], columns: int) -> list[str]:
        """The lines that were open a moment ago already, but for those that the board shows as bars."""
        now = [
            line
            for one in ranks
            for line in one.open_lines
            if not draws_a_bar(line, one.progress.values()) and line.text
        ]
        lasting: list[LogLine] = [line for line in now if (line.rank, line.stream) in self._seen_open]
        self._seen_open = {(line.rank, line.stream) for line in now}
        texts = [
            within(f"[{named(one.ranks)}] {plain(one.item.text)}", columns - 1)
            for one in folded(lasting)
            if isinstance(one.item, LogLine)
        ]
        more = [f"... and {len(texts) - _OPEN_LINES} more"] if len(texts) > _OPEN_LINES else []
        return [*texts[:_OPEN_LINES], *more]

    def _told(self, status: Iterable[tuple[int | None, str]]) -> list[Line]:
        return [Line("stderr", text if rank is None else self._label([rank], "stderr") + text) for rank, text in status]

    def _summary(self, run: Watched) -> Iterator[Line]:
        """How a run that has ended went: its state and time, the course of each metric, why it failed."""
        view = run.view
        if view.ended is None:
            return
        cause = cause_of(view.failures, _ERROR) if view.state == "failed" else None
        self.has_told_failure = cause is not None
        if not self._is_quiet:
            ranks = [view.rank(rank) for rank in view.ranks]
            yield self._said(f"{SIGNS[view.state]} {head_of(run, ranks)}", _END_COLOURS[view.state])
            yield from map(self._said, metric_lines(ranks))
        if cause is not None:
            headline, *more = cause_lines(cause)
            yield self._said(headline, _END_COLOURS["failed"])
            # a program that ends itself has said why; where it called sys.exit is no news
            if not _is_an_end_of_its_own(view):
                yield from (self._said(line) for text in more for line in text.splitlines())
        if not self._is_quiet:
            yield self._said(f"All output: {run.folder}")

    def _said(self, text: str, colour: int = 0) -> Line:
        """A line of what is said of the run; in a terminal bold, and in a colour, where it has one."""
        is_dyed = colour and self._streams.has_colours and self._streams.is_terminal("stderr")
        return Line("stderr", f"\x1b[1;{colour}m{text}\x1b[0m" if is_dyed else text)


def _is_an_end_of_its_own(view: RunView) -> bool:
    """Whether the program ended itself with a code (`sys.exit(2)`), and did not fail."""
    first = first_cause(view.failures)
    return first.type == "SystemExit" and first.message.isdecimal()
