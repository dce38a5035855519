"""A run in the outputs of a notebook's cells: live while it goes on, and a report when it is over."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

from accelerate_nb.events.event_types import Display
from accelerate_nb.events.run_folder import shown_path
from accelerate_nb.launching.run import FrontEnd, Run, keep_drawing
from accelerate_nb.notebook.display.busy_kernel_comm import kernel_comm
from accelerate_nb.notebook.display.message_feed import is_text
from accelerate_nb.notebook.display.output_area import CellOutputArea, MimeBundle, OutputArea, cell_now
from accelerate_nb.notebook.display.text_output import CellSink
from accelerate_nb.reports.report import run_report
from accelerate_nb.reports.summary import RunFacts
from accelerate_nb.user_warnings import warn_user

if TYPE_CHECKING:
    from accelerate_nb.notebook.display.panel import LivePanel

# The seconds for a page's hello: where one has come before, where none was tried yet, and where none has replied.
_TIMEOUT = {True: 10.0, None: 3.0, False: 1.5}
_BETWEEN_DRAWINGS = 1.0
# Widgets of so many runs that are over stay alive: a page that was reloaded meanwhile shows one, not the report. Those that
# no page has seen the end of, such as a night's runs, stay longer.
_KEPT, _KEPT_UNSEEN = 8, 64


class _KeptWidget(Protocol):
    @property
    def is_delivered(self) -> bool:
        """Whether a page has all of it."""

    def close(self) -> None:
        """Take a widget away from all pages."""


class FrontendState:
    """The state of the pages that show this notebook: whether one ever replied, and panels that they may still show."""

    def __init__(self) -> None:
        self.reply: bool | None = None
        self._over: deque[_KeptWidget] = deque()
        # several runs may end at once, each in its thread
        self._lock = threading.Lock()

    def keep(self, widget: _KeptWidget) -> None:
        """Let the panel of a run that is over stay, or a table of runs, and take away an old one for it."""
        with self._lock:
            with suppress(ValueError):
                # it is in use again
                self._over.remove(widget)
            self._over.append(widget)
            unneeded = [item for item in self._over if item.is_delivered][:-_KEPT] or [*self._over][:-_KEPT_UNSEEN]
            for item in unneeded:
                self._over.remove(item)
        for item in unneeded:
            item.close()


_frontend: ContextVar[FrontendState] = ContextVar("accelerate_nb_pages", default=FrontendState())  # noqa: B039 - one for all threads


def frontend_state() -> FrontendState:
    """The state of the pages that show this notebook."""
    return _frontend.get()


class RunDisplay(FrontEnd):
    """Shows a run as a live panel, or as HTML that is redrawn about once a second, and at the end as a report."""

    def __init__(
        self,
        host: str,
        *,
        live: bool,
        clock: Callable[[], float] = time.monotonic,
        new_output: Callable[[MimeBundle], OutputArea] = CellOutputArea,
    ) -> None:
        # with `live`, HTML stands in until a page reports that it draws the panel; the panel of a run that is over takes its report's place
        self._host, self._live, self._clock = host, live, clock
        self._new_output = new_output
        self._frontend, self._kernel_comm = frontend_state(), kernel_comm()
        self._lock = threading.RLock()
        self._waits = ExitStack()
        self._run: Run | None = None
        self._opening: Run | None = None
        self._panel: LivePanel | None = None
        self._outputs: list[OutputArea] = []
        self._thread: threading.Thread | None = None
        self._is_static = not live
        self._is_over = False
        self._reply_deadline = self._next_drawing = 0.0
        self._seen = -1
        self._cursor = 0
        self._displays_left = CellSink.bound.displays

    # ------------------------------------------------------------------------------------------------- as a front end

    def opened(self, run: Run) -> None:
        """The running cell waits for the run from now on; the first refresh draws, since workers that start need the cores."""
        self._opening = run

    def refresh(self) -> None:
        """Handle the page's messages, and draw the changes; called some times a second from the waiting thread."""
        self._open()
        self._kernel_comm.pump()
        self._step()

    def closed(self) -> None:
        """The wait is over: leave the report, or continue in the background."""
        self._open()
        self._waits.close()
        if self._run is not None and not self._run.done:
            self._go_on(self._run)
        else:
            self._end()

    def follow(self, run: Run) -> None:
        """Show the run in the cell that runs at this moment, until it is over; returns at once."""
        self._begin(run, background=True)
        self._go_on(run)

    def show(self, run: Run) -> None:
        """Show the run in the cell that runs at this moment as well; returns at once."""
        if self._run is None:
            return self.follow(run)
        with self._lock:
            if cell_now() not in {output.cell for output in self._outputs}:
                self._outputs.append(CellOutputArea(self._bundle()))
        return None

    @property
    def shows_failure(self) -> bool:
        """Whether a page has drawn the panel, which shows a failure."""
        return self._panel is not None and self._panel.replied

    # --------------------------------------------------------------------------------------------------------- inside

    def _open(self) -> None:
        """Draw for the first time, once; an interrupt may come at any line of it."""
        if self._opening is not None:
            self._begin(self._opening, background=False)
            self._waits.enter_context(self._kernel_comm.held())
            self._opening = None

    def _begin(self, run: Run, *, background: bool) -> None:
        if self._run is not None:
            return
        self._run = run
        try:
            with self._lock:
                self._facts = RunFacts.of(run, self._host, background=background, can_act=False)
                # one that a cell waits for is ended by `closed`, however soon it was over
                self._is_over = background and run.done
                if self._live:
                    from accelerate_nb.notebook.display.panel import LivePanel

                    self._panel = LivePanel(run, self._host, self._kernel_comm, background=background)
                    self._reply_deadline = self._clock() + _TIMEOUT[self._frontend.reply]
                    if self._is_over:
                        self._frontend.keep(self._panel)
                self._outputs.append(self._new_output(self._bundle()))
                # a row of a table has no place for them
                if self._is_over and self._new_output is CellOutputArea:
                    self._show_displays()
        except Exception as error:  # noqa: BLE001 - a run is not lost because it can't be shown
            self._give_up(error)

    def _go_on(self, run: Run) -> None:
        with self._lock:
            if not self._is_over and (self._thread is None or not self._thread.is_alive()):
                self._thread = keep_drawing(run, self._step, self._end)

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
            # HTML where no page has replied in time, the panel as soon as one has
            is_late = not self._panel.replied and self._clock() > self._reply_deadline
            if self._panel.replied or is_late:
                self._frontend.reply = self._panel.replied
            if self._is_static is not is_late:
                self._is_static = is_late
                self._update(self._bundle())
        changes = self._handle.view.changes
        if self._is_static and self._clock() >= self._next_drawing and self._seen != changes:
            self._seen = changes
            began = self._clock()
            self._update(self._bundle())
            # where a drawing takes long, there are fewer of them
            self._next_drawing = self._clock() + max(_BETWEEN_DRAWINGS, 10 * (self._clock() - began))
        self._show_displays()

    def _show_displays(self) -> None:
        """Show, under the card, what ranks showed that is more than text."""
        news, folder = self._handle.view.since(self._cursor), self._handle.folder
        self._cursor = news.cursor
        for item in news.items:
            if not isinstance(item, Display) or is_text(item):
                continue
            name = f"{folder.name}-{item.rank}-{item.name}" if item.name else ""
            if item.update:
                CellSink().show(item.data, item.metadata, name, update=True)
            elif self._displays_left > 0:
                self._displays_left -= 1
                sys.stdout.write(f"[{item.rank}]\n")
                CellSink().show(item.data, item.metadata, name)
                if not self._displays_left:
                    sys.stdout.write(f"... a cell shows no more; the other displays are in {shown_path(folder)} ...\n")

    def _end(self) -> None:
        """Draw the last state, and replace the live display by the report."""
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
                    self._frontend.keep(self._panel)
        except Exception as error:  # noqa: BLE001 - a run is not lost because it can't be shown
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._is_over = True
        if self._panel is not None:
            self._panel.close()
            self._panel = None
        warn_user(
            f"The run can't be shown any more ({type(error).__name__}: {error}). It goes on; its output is in "
            f"{shown_path(self._handle.folder)}. panel='text' shows it as lines.",
            RuntimeWarning,
        )

    @property
    def _handle(self) -> Run:
        assert self._run is not None
        return self._run

    def _bundle(self) -> MimeBundle:
        drawn = run_report(self._facts, self._handle.view, live=not self._is_over)
        if self._is_over or self._panel is None or self._is_static:
            return MimeBundle(drawn)
        # a page draws the panel; a notebook that is saved now keeps the rest for readers without a kernel
        data, metadata = self._panel.bundle()
        return MimeBundle({**data, **drawn}, metadata)

    def _update(self, bundle: MimeBundle) -> None:
        for output in self._outputs:
            output.update(bundle)
