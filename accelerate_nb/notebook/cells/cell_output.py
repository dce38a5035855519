"""The front end of a cell that runs on every rank: what ranks put out, equal output once."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from string import Template
from typing import Literal

from accelerate_nb.config.rank_lists import named, of_ranks
from accelerate_nb.events.collapse import CollapsedOutput, OutputCollapser, folded, is_text, key_of
from accelerate_nb.events.model import Display, LogLine
from accelerate_nb.events.run_folder import shown_path
from accelerate_nb.events.run_state import RunState
from accelerate_nb.events.terminal_lines import cleaned
from accelerate_nb.launching.session.cell_run import CellResult, CellRun
from accelerate_nb.launching.session.session import Session
from accelerate_nb.notebook.display.text_sinks import LabelledLine, TextSink
from accelerate_nb.reports.status_lines import undrawn
from accelerate_nb.reports.summary import bar_text
from accelerate_nb.reports.text_format import first_within, saved_size

_INTERVAL = 0.1
_PER_LINE = 146  # bytes with which a saved notebook surrounds a line of another stream than the one before, beside the line's own
_OPEN_LINES = 32


class CellOutput:
    """
    Writes the output of a session's ranks while a cell runs, on a screen and within its limits.

    The prefix of a line names the ranks that wrote it, such as `[0-7]`, or is made by `prefix_template`. Figures
    and tables are shown of the cell's first rank, or with `displays="all"` of every rank. `cursor` is where in the view
    the cell begins, and afterwards where it ended.

    >>> output = CellOutput(PipeSink(), session.view, ranks=(0, 1), size=2, folder=session.folder)
    >>> output.refresh()
    >>> output.closed()
    """

    # the traceback does
    shows_failure = False

    @classmethod
    def of(
        cls, session: Session, run: CellRun, screen: TextSink, cursor: int, displays: Literal["main", "all"] = "main"
    ) -> CellOutput:
        """The writer for a session's cell."""
        return cls(
            screen,
            session.view,
            ranks=run.ranks,
            size=session.size,
            folder=session.folder,
            cursor=cursor,
            displays=displays,
            prefix_template=session.config.launching.log_line_prefix_template,
        )

    def __init__(
        self,
        screen: TextSink,
        view: RunState,
        *,
        ranks: Sequence[int],
        size: int,
        folder: Path,
        cursor: int = 0,
        displays: Literal["main", "all"] = "main",
        prefix_template: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cursor = cursor
        self._screen, self._view, self._folder = screen, view, folder
        self._ranks, self._leading, self._shows_all = tuple(ranks), ranks[0], displays == "all"
        self._template = None if prefix_template is None else Template(prefix_template)
        self._width = len(f"[{named(range(size))}] ")
        self._folding = OutputCollapser(ranks)
        self._clock, self._due = clock, clock()
        self._lines_left, self._size_left = screen.bound.lines, screen.bound.size
        self._displays_left = screen.bound.displays
        self._tail: deque[LabelledLine] = deque(maxlen=max(screen.bound.tail_lines, 1))
        self._not_written = 0
        self._seen_open: set[tuple[int, str]] = set()
        self._shown: set[Hashable] = set()
        self._left_out: set[int] = set()
        self._reported_seconds = 0.0

    def refresh(self) -> None:
        """Write what is new; called often, it does so a few times a second."""
        if self._clock() < self._due:
            return
        self._read()
        self._write(self._folding.ready(self._clock()))
        self._report_hang()
        self._draw_open()
        self._due = self._clock() + _INTERVAL

    def closed(self, results: Iterable[Display] = ()) -> None:
        """Write all that is left: the cell has run; `results` are the values of its last expression."""
        self._read()
        self._write(self._folding.rest())
        self._screen.show_open(())
        self._write(folded(self._view.open_lines()))
        self._folding.take(results, self._clock())
        self._write(self._folding.rest())
        self._write_tail()
        if self._left_out:
            self._note(f"displays of {of_ranks(sorted(self._left_out))} are left out; --displays all shows them")

    def values(self, results: Iterable[Display]) -> None:
        """Write nothing but the values of a cell's last expression: something else has shown the rest."""
        self.cursor = self._view.since(self.cursor).cursor
        self._folding.take(results, self._clock())
        self._write(self._folding.rest())

    def _report_hang(self) -> None:
        """Show the stacks of ranks without output for long, and again each time that the time has doubled."""
        warning = self._view.idle_warning
        if warning is None:
            self._reported_seconds = 0.0
        elif warning.seconds >= 2 * self._reported_seconds:
            self._reported_seconds = warning.seconds
            texts = (f"... {cleaned(text, None)}" for text in warning.text.splitlines())
            self._screen.write([LabelledLine("stdout", text) for text in texts])

    def _read(self) -> None:
        news = self._view.since(self.cursor)
        self.cursor = news.cursor
        if news.skipped and not self._not_written:
            self._note(
                f"{news.skipped:,} lines came faster than they could be shown; they are in {shown_path(self._folder)}"
            )
        self._folding.take(news.shown, self._clock())

    def _note(self, text: str) -> None:
        self._screen.write([LabelledLine("stdout", f"... {text} ...")])

    # --------------------------------------------------------------------------------------------------------- writing

    def _write(self, came: Iterable[CollapsedOutput]) -> None:
        batch: list[LabelledLine] = []
        every = list(came)
        newest = {self._name(item.item): item for item in every if isinstance(item.item, Display) and item.item.update}
        for item in every:
            if isinstance(item.item, Display) and item.item.update:
                if newest[self._name(item.item)] is item:
                    self._show_anew(item.ranks, item.item)
            elif isinstance(item.item, Display) and not is_text(item.item):
                self._screen.write(batch)
                batch = []
                self._show(item.ranks, item.item)
            else:
                self._add(self._lines(item), batch)
        self._screen.write(batch)

    def _add(self, lines: Sequence[LabelledLine], batch: list[LabelledLine]) -> None:
        """Add lines to those to be written within the limit; the last ones are kept for the end."""
        cost = sum(saved_size(line.text) + _PER_LINE for line in lines)
        if not self._not_written and len(lines) <= self._lines_left and cost <= self._size_left:
            self._lines_left -= len(lines)
            self._size_left -= cost
            batch.extend(lines)
            return
        if not self._not_written:
            text = f"... a cell holds no more; all lines of each rank are in {shown_path(self._folder)} ..."
            batch.append(LabelledLine("stdout", text))
        self._not_written += len(lines)
        self._tail.extend(lines)

    def _lines(self, collapsed_output: CollapsedOutput) -> list[LabelledLine]:
        item, label = collapsed_output.item, self._label(collapsed_output.ranks)
        if isinstance(item, Display):
            text = str(item.data.get("text/plain", ""))
            indent = " " * len(label)
            # one value over several lines keeps its shape
            return [
                LabelledLine("stdout", (indent if number else label) + self._screen.clean(part, "stdout"))
                for number, part in enumerate(text.splitlines())
            ]
        text = self._screen.clean(item.text, item.stream)
        # a line of nothing but cursor movements is no line
        return [] if item.text and not text else [LabelledLine(item.stream, label + text, item.meaning)]

    def _label(self, ranks: Sequence[int]) -> str:
        name = named(ranks)
        if self._template is not None:
            return self._template.safe_substitute(role_name="default", local_rank=name, rank=name)
        return f"[{name}] ".ljust(self._width)

    def _write_tail(self) -> None:
        """The last lines, where the limit was reached."""
        if not self._not_written:
            return
        newest, size_limit = reversed(self._tail), self._screen.bound.tail_size
        fitting = first_within(newest, size_limit, lambda line: saved_size(line.text) + _PER_LINE)[::-1]
        if left_out := self._not_written - len(fitting):
            self._note(f"{left_out:,} lines are only in {shown_path(self._folder)}")
        self._screen.write(fitting)

    # -------------------------------------------------------------------------------------------- displays, progress

    def _show(self, ranks: tuple[int, ...], display: Display) -> None:
        """Show something rich under its label, if it is one to show."""
        if not self._shows_all and self._leading not in ranks:
            if key_of(display) not in self._shown:
                self._left_out.update(ranks)
            return
        self._shown.add(key_of(display))
        if not self._shows_all and ranks != self._ranks:
            ranks = (self._leading,)
        if self._displays_left < 1:
            return
        self._displays_left -= 1
        self._screen.write([LabelledLine("stdout", self._label(ranks).rstrip())])
        self._screen.show(display.data, display.metadata, self._name(display))
        if self._displays_left < 1:
            self._note(f"a cell shows no more; the other displays are in {shown_path(self._folder)}")

    def _show_anew(self, ranks: tuple[int, ...], display: Display) -> None:
        """Replace the display of the same name, also under an earlier cell."""
        if self._shows_all or self._leading in ranks:
            self._screen.show(display.data, display.metadata, self._name(display), update=True)

    def _name(self, display: Display) -> str:
        """The display id in the notebook, if the display may be updated."""
        return f"{self._folder.name}-{display.rank}-{display.name}" if display.name else ""

    def _draw_open(self) -> None:
        """Show the lines that were open a moment ago already: what only waits for its newline is no progress bar."""
        ranks = [glance for glance in self._view.glances() if glance.rank in self._ranks]
        now = [line for rank in ranks for line in rank.open_lines]
        lasting: list[LogLine] = [line for line in now if (line.rank, line.stream) in self._seen_open]
        self._seen_open = {(line.rank, line.stream) for line in now}
        # but for the bars that a rank draws itself
        moving = ((rank.rank, bar) for rank in map(undrawn, ranks) for bar in rank.progress.values() if not bar.closed)
        bars = [LogLine(rank, "stderr", bar_text(bar), 0.0, open=True) for rank, bar in moving]
        texts = [line.text for item in folded([*lasting, *bars]) for line in self._lines(item)]
        if len(texts) > _OPEN_LINES:
            texts[_OPEN_LINES:] = [f"... and {len(texts) - _OPEN_LINES} more"]
        self._screen.show_open(texts)


def results_of(ends: Iterable[CellResult]) -> list[Display]:
    """The values of a cell's last expression, of those ranks where it has one."""
    return [Display(end.rank, end.result, dict(end.metadata), time.time()) for end in ends if end.result is not None]
