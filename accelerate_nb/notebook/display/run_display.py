"""A run in the outputs of a notebook's cells: live while it goes on, and a report when it is over."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from typing import TYPE_CHECKING

from accelerate_nb.events.model import Display
from accelerate_nb.launching.following import ByItself, keep_drawing
from accelerate_nb.launching.run import Watched
from accelerate_nb.notebook.live.feed import is_text
from accelerate_nb.notebook.live.lane import lane
from accelerate_nb.notebook.live.outputs import Bundle, Output, cell_now
from accelerate_nb.notebook.page import saved
from accelerate_nb.notebook.screens import Cell
from accelerate_nb.notices import notice
from accelerate_nb.reports.facts import Facts

if TYPE_CHECKING:
    from accelerate_nb.notebook.panel import LivePanel

# How long a page may take to say hello: where one has before, where none was asked yet, and where none answered.
_PATIENCE = {True: 10.0, None: 3.0, False: 1.5}
_BETWEEN_DRAWINGS = 1.0
# Widgets of so many runs that are over stay alive: a page that was loaded anew meanwhile shows one, not the report.
_KEPT = 8


class Pages:
    """What is known of the pages that show this notebook: whether one ever answered, and panels that they may still show."""

    def __init__(self) -> None:
        self.answer: bool | None = None
        self._over: deque[LivePanel] = deque()

    def patience(self) -> float:
        """How many seconds to wait for a page's hello."""
        return _PATIENCE[self.answer]

    def keep(self, panel: LivePanel) -> None:
        """Let a panel stay whose run is over, and take away an old one for it."""
        self._over.append(panel)
        if len(self._over) > _KEPT:
            self._over.popleft().close()


_pages: ContextVar[Pages] = ContextVar("accelerate_nb_pages", default=Pages())  # noqa: B039 - one for all threads


class Card:
    """
    Shows a run as a live panel, or as HTML that is drawn anew about once a second, and at the end as a report.

    With `live`, the panel is tried first; where no page says in time that it draws it, HTML takes its place, until one
    does. Once a card is in a cell, waiting for the run in another one shows no second card.

    >>> card = Card("jupyter", live=True)
    >>> card.opened(run)
    >>> while not run.done: card.refresh()
    >>> card.closed()
    """

    def __init__(self, host: str, *, live: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._host, self._live, self._clock = host, live, clock
        self._pages, self._lane = _pages.get(), lane()
        self._lock = threading.RLock()
        self._waits = ExitStack()
        self._run: Watched | None = None
        self._panel: LivePanel | None = None
        self._outputs: list[Output] = []
        self._thread: threading.Thread | None = None
        self._is_static = not live
        self._is_over = False
        self._answer_until = self._next_drawing = 0.0
        self._seen = -1
        self._cursor = 0
        self._displays_left = Cell.bound.displays

    # ------------------------------------------------------------------------------------------------- as a front end

    def opened(self, run: Watched) -> None:
        """Somebody waits for the run from now on, in the cell that runs at this moment."""
        self._begin(run, background=False)
        self._waits.enter_context(self._lane.held())

    def refresh(self) -> None:
        """Hear the page, and draw what is new; called some times a second from the waiting thread."""
        self._lane.pump()
        self._step()

    def closed(self) -> None:
        """Nobody waits any more: leave the report, or go on without anybody."""
        self._waits.close()
        if self._run is not None and not self._run.done:
            self._go_on(self._run)
        else:
            self._end()

    def follow(self, run: Watched) -> None:
        """Show the run in the cell that runs at this moment, until it is over; returns at once."""
        self._begin(run, background=True)
        self._go_on(run)

    def show(self, run: Watched) -> None:
        """Show the run in the cell that runs at this moment as well; returns at once."""
        if self._run is None:
            return self.follow(run)
        with self._lock:
            if self._is_over or cell_now() not in {one.cell for one in self._outputs}:
                self._outputs.append(Output(self._bundle()))
        return None

    # --------------------------------------------------------------------------------------------------------- inside

    def _begin(self, run: Watched, *, background: bool) -> None:
        if self._run is not None:
            return
        self._run = run
        try:
            self._put(run, background=background)
        except Exception as error:  # noqa: BLE001 - a run is not lost because it can't be shown
            self._give_up(error)

    def _put(self, run: Watched, *, background: bool) -> None:
        """Put the card into the cell that runs at this moment."""
        with self._lock:
            self._facts = Facts.of(run, self._host, background=background, can_act=False)
            self._is_over = run.done
            if self._live and not run.done:
                self._panel = self._new_panel(run, background=background)
                self._answer_until = self._clock() + self._pages.patience()
            self._outputs.append(Output(self._bundle()))

    def _new_panel(self, run: Watched, *, background: bool) -> LivePanel:
        from accelerate_nb.notebook.panel import LivePanel

        return LivePanel(run, self._host, self._lane, background=background)

    def _go_on(self, run: Watched) -> None:
        with self._lock:
            if not self._is_over and (self._thread is None or not self._thread.is_alive()):
                self._thread = keep_drawing(ByItself(self._step, self._end), run)

    def _step(self) -> None:
        try:
            with self._lock:
                if not self._is_over:
                    self._draw()
        except Exception as error:  # noqa: BLE001 - a run is not lost because it can't be shown
            self._give_up(error)

    def _draw(self) -> None:
        if self._panel is not None:
            self._panel.step()
            self._choose(self._panel)
        if self._is_static and self._clock() >= self._next_drawing and self._has_news():
            began = self._clock()
            self._update(self._bundle())
            # where a drawing takes long, there are fewer of them
            self._next_drawing = self._clock() + max(_BETWEEN_DRAWINGS, 10 * (self._clock() - began))
        self._show_displays()

    def _choose(self, panel: LivePanel) -> None:
        """HTML where no page has answered in time, the panel as soon as one has."""
        is_late = not panel.answered and self._clock() > self._answer_until
        if panel.answered or is_late:
            self._pages.answer = panel.answered
        if self._is_static is not is_late:
            self._is_static = is_late
            self._update(self._bundle())

    def _has_news(self) -> bool:
        seen, self._seen = self._seen, self._watched.view.changes
        return seen != self._seen

    def _end(self) -> None:
        """Draw the last, and put the report in the place of what moved."""
        try:
            with self._lock:
                if self._is_over or self._run is None:
                    return
                self._draw()
                self._is_over = True
                report = self._bundle()
                self._update(report)
                if self._panel is not None:
                    self._panel.end(report)
                    self._pages.keep(self._panel)
        except Exception as error:  # noqa: BLE001 - a run is not lost because it can't be shown
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._is_over = True
        if self._panel is not None:
            self._panel.close()
        notice(
            f"The run can't be shown any more ({type(error).__name__}: {error}). It goes on; its output is in "
            f"{self._watched.folder}. panel='text' shows it as lines.",
            RuntimeWarning,
        )

    @property
    def _watched(self) -> Watched:
        assert self._run is not None
        return self._run

    def _bundle(self) -> Bundle:
        if self._is_over:
            return Bundle(saved.bundle(self._facts, self._watched.view, live=False, interactive=self._live))
        drawn = saved.bundle(self._facts, self._watched.view, live=True, interactive=False)
        if self._panel is None or self._is_static:
            return Bundle(drawn)
        # a page draws the panel; a notebook that is saved now keeps the rest for whoever has no kernel
        data, metadata = self._panel.bundle()
        return Bundle({**data, **drawn}, metadata)

    def _update(self, bundle: Bundle) -> None:
        for one in self._outputs:
            one.update(bundle)

    def _show_displays(self) -> None:
        """Show under the card what ranks showed that is more than text."""
        news = self._watched.view.since(self._cursor)
        self._cursor = news.cursor
        for one in news.shown:
            if isinstance(one, Display) and not is_text(one) and self._displays_left > 0:
                self._displays_left -= 1
                sys.stdout.write(f"[{one.rank}]\n")
                Cell().show(one.data, one.metadata)
