"""A cell that runs in a session beside the notebook."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from accelerate_nb.config.rank_lists import of_ranks
from accelerate_nb.errors import mark_in_panel
from accelerate_nb.launching.front_end import keep_drawing
from accelerate_nb.launching.session.cell_run import CellResult, CellRun
from accelerate_nb.notebook.cells.cell_output import CellOutput, results_of
from accelerate_nb.notebook.cells.panel_output import PanelOutput
from accelerate_nb.notebook.display.text_sinks import LabelledLine, TextSink

_POLL_INTERVAL = 0.05


class BackgroundCell:
    """
    A background cell, as `%%accelerate --background` returns it. Its output continues under its cell.

    >>> cell = _
    >>> cell.wait()
    """

    def __init__(
        self, run: CellRun, output: CellOutput | PanelOutput, screen: TextSink, ended: Callable[[], None]
    ) -> None:
        self._run, self._output, self._screen, self._ended = run, output, screen, ended
        self._drawing: threading.Thread | None = None

    def follow(self) -> BackgroundCell:
        """Show its output under the cell that runs at this moment; returns at once."""
        self._drawing = keep_drawing(self, self._run)
        return self

    @property
    def name(self) -> str:
        """The name of the cell."""
        return self._run.name

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that run it."""
        return self._run.ranks

    @property
    def done(self) -> bool:
        """Whether every rank has run it, and all its output is shown."""
        return self._run.done and not (self._drawing is not None and self._drawing.is_alive())

    @property
    def seconds(self) -> float:
        """The seconds for which it has run, or ran."""
        if not self._run.done:
            return time.time() - self._run.started
        return max((end.seconds for end in self._run.ends), default=0.0)

    def wait(self, timeout: float | None = None) -> tuple[CellResult, ...]:
        """
        Wait until it has run, for at most `timeout` seconds; how each rank ended.

        Raises what a rank raised, and `TimeoutError`. An interrupt ends the waiting: the cell goes on.
        """
        __tracebackhide__ = True  # IPython shows the person's own frames alone
        self.finish(timeout)
        if not self.done:
            raise TimeoutError(f"{self.name} has not ended after {timeout:g} s of waiting. It goes on; wait again.")
        if self._run.error is not None and self._output.shows_failure:
            mark_in_panel(self._run.error)
        return self._run.wait()

    def finish(self, timeout: float | None = None) -> None:
        """Wait until it has run, whatever came of it."""
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = threading.Event()
        while not self.done and (deadline is None or time.monotonic() < deadline):
            pause.wait(_POLL_INTERVAL)

    def interrupt(self) -> None:
        """Interrupt it on every rank; the session goes on."""
        self._run.interrupt()

    def stacks(self) -> str:
        """The current stack of every rank."""
        return self._run.stacks()

    def refresh(self) -> None:
        """Draw what is new."""
        self._output.refresh()

    def closed(self) -> None:
        """Draw the last, and what became of it."""
        self._output.closed(results_of(self._run.ends))
        self._ended()
        if (error := self._run.error) is not None and not self._output.shows_failure:
            text = f"{type(error).__name__}: {error}"
            self._screen.write([LabelledLine("stderr", line, "error") for line in text.splitlines()])

    def __repr__(self) -> str:
        where = of_ranks(self.ranks)
        if not self._run.done:
            return f"<{self.name} runs on {where} in the background: .wait(), .interrupt(), %accelerate status>"
        how = "has run" if self._run.error is None else f"stopped with {type(self._run.error).__name__}"
        return f"<{self.name} {how} on {where}: {self.seconds:.1f} s>"
