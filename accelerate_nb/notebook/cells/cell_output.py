"""The front end of a cell that runs on every rank of a session."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

from accelerate_nb.config.rank_lists import of_ranks
from accelerate_nb.events.event_types import Display
from accelerate_nb.launching.run import FrontEnd, Run, keep_drawing
from accelerate_nb.launching.session import CellResult
from accelerate_nb.notebook.display.text import TextFrontEnd
from accelerate_nb.notebook.display.text_output import LabelledLine, TextSink

# The seconds for the last lines of a cell that draws by itself, which a wait for it leaves to the cell.
_LAST_DRAWING = 10.0


class CellOutput(FrontEnd):
    """The front end of a session's cell: text, or a `panel`; and in the end the values of its last expression, as text."""

    def __init__(
        self,
        new_sink: Callable[[], TextSink],
        ranks: Sequence[int],
        prefix_template: str | None = None,
        displays: Literal["main", "all"] = "main",
        panel: FrontEnd | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._new_sink = new_sink
        self._text = TextFrontEnd(new_sink, prefix_template, only_ranks=ranks, cell_displays=displays, clock=clock)
        self._display: FrontEnd = panel or self._text
        self._run: Run | None = None
        self._drawing: threading.Thread | None = None

    @property
    def shows_failure(self) -> bool:
        """Whether a person sees the cell's failure in it."""
        return self._display.shows_failure

    def opened(self, run: Run) -> None:
        """The running cell waits for this one from now on."""
        if self._drawing is None:
            self._run = run
            self._display.opened(run)

    def refresh(self) -> None:
        """Draw what is new."""
        if self._drawing is None:
            self._display.refresh()

    def closed(self) -> None:
        """Draw the last, and the values of the last expression."""
        if self._drawing is None:
            self._close()
        elif self._run is not None and self._run.done:
            self._drawing.join(_LAST_DRAWING)

    def follow(self, run: Run) -> None:
        """Show the cell under the one that runs at this moment, until it is over; returns at once."""
        self._run, sink = run, self._new_sink()
        draws_by_itself = self._display is not self._text
        if draws_by_itself:
            self._display.follow(run)
        else:
            self._display.opened(run)

        def closed() -> None:
            self._close(draws=not draws_by_itself)
            if run.error is not None and not self.shows_failure:
                text = f"{type(run.error).__name__}: {run.error}"
                sink.write([LabelledLine("stderr", line, "error") for line in text.splitlines()])

        refresh = (lambda: None) if draws_by_itself else self._display.refresh
        self._drawing = keep_drawing(run, refresh, closed)

    def show(self, run: Run) -> None:
        """Show in a line where the cell runs, or how it went."""
        where = of_ranks(run.ranks)
        text = f"<{run.name} runs on {where} in the background: .wait(), .interrupt(), %accelerate status>"
        if run.done:
            how = "has run" if run.error is None else f"stopped with {type(run.error).__name__}"
            text = f"<{run.name} {how} on {where}: {run.seconds:.1f} s>"
        self._new_sink().show({"text/plain": text}, {})

    def _close(self, *, draws: bool = True) -> None:
        if draws:
            self._display.closed()
        if self._run is not None:
            ends = (end for end in self._run.rank_results if isinstance(end, CellResult))
            now = time.time()
            self._text.put(
                self._run, [Display(end.rank, end.result, dict(end.metadata), now) for end in ends if end.result]
            )
