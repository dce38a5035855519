"""The front end of a cell that runs on every rank: what ranks put out, equal output once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

from accelerate_nb.events.model import Display, LogLine
from accelerate_nb.events.run_state import RunState
from accelerate_nb.events.terminal_lines import cleaned
from accelerate_nb.launching.session.cell_run import CellResult, CellRun
from accelerate_nb.launching.session.session import Session
from accelerate_nb.notebook.display.output_writer import OutputWriter
from accelerate_nb.notebook.display.text_sinks import LabelledLine, TextSink
from accelerate_nb.reports.status_lines import undrawn
from accelerate_nb.reports.summary import bar_text

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
        self._sink, self._view, self._ranks = screen, view, tuple(ranks)
        self._output = OutputWriter(
            screen,
            view,
            folder,
            ranks=ranks,
            size=size,
            only=ranks,
            cursor=cursor,
            folds=True,
            prefix_template=prefix_template,
            leading=None if displays == "all" else ranks[0],
            clock=clock,
        )
        self._clock, self._due = clock, clock()
        self._reported_seconds = 0.0

    @property
    def cursor(self) -> int:
        """Where in the view the cell ended."""
        return self._output.cursor

    def refresh(self) -> None:
        """Write what is new; called often, it does so a few times a second."""
        if self._clock() < self._due:
            return
        self._output.write()
        self._report_hang()
        ranks = [glance for glance in self._view.glances() if glance.rank in self._ranks]
        # but for the bars that a rank draws itself
        moving = ((rank.rank, bar) for rank in map(undrawn, ranks) for bar in rank.progress.values() if not bar.closed)
        bars = [LogLine(rank, "stderr", bar_text(bar), 0.0, open=True) for rank, bar in moving]
        self._sink.show_open(self._output.open_lines(ranks, bars))
        self._due = self._clock() + _INTERVAL

    def closed(self, results: Iterable[Display] = ()) -> None:
        """Write all that is left: the cell has run; `results` are the values of its last expression."""
        self._output.finish()
        self._output.put(results)

    def values(self, results: Iterable[Display]) -> None:
        """Write nothing but the values of a cell's last expression: something else has shown the rest."""
        self._output.cursor = self._view.since(self.cursor).cursor
        self._output.put(results)

    def _report_hang(self) -> None:
        """Show the stacks of ranks without output for long, and again each time that the time has doubled."""
        warning = self._view.idle_warning
        if warning is None:
            self._reported_seconds = 0.0
        elif warning.seconds >= 2 * self._reported_seconds:
            self._reported_seconds = warning.seconds
            texts = (f"... {cleaned(text, None)}" for text in warning.text.splitlines())
            self._sink.write([LabelledLine("stdout", text) for text in texts])


def results_of(ends: Iterable[CellResult]) -> list[Display]:
    """The values of a cell's last expression, of those ranks where it has one."""
    return [Display(end.rank, end.result, dict(end.metadata), time.time()) for end in ends if end.result is not None]
