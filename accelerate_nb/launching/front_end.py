"""The two sides of a view of a run: the front end that shows it, and the run as a front end sees it; and the clock of its refreshes."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from accelerate_nb.events.run_state import RunInfo
from accelerate_nb.launching.run_context import Stop

_BETWEEN_REFRESHES = 0.1


class RunHandle(RunInfo, Protocol):
    """A run as a front end sees it: state to read, and requests to make."""

    @property
    def done(self) -> bool:
        """Whether every worker has ended."""

    def request_stop(self, how: Stop) -> None:
        """
        Request the end, from any thread, without waiting for it.

        "finish" lets every rank end after the same step, "interrupt" interrupts them where they are, "kill" just ends them.
        """

    def set_knob(self, name: str, value: float) -> None:
        """
        Change a knob of the training (`Accelerator.knob`), from any thread, without waiting for it.

        Raises `ConfigurationError` for an unknown knob or a bad value, `StateError` where nothing can be changed.
        """

    def profile(self, steps: int = 10, ranks: Iterable[int] | None = None) -> None:
        """
        Have ranks, by default all, profile their next optimizer steps, from any thread, without waiting for it.

        Raises `ConfigurationError` for bad steps or ranks, `StateError` and `NotYetError` where they can't be profiled.
        """

    def stacks(self) -> str:
        """The stack of every rank that still runs; takes up to some seconds."""

    def log_file(self, rank: int) -> Path:
        """The file that holds all that a rank wrote so far; there is none where it wrote nothing."""


class NoFrontEnd:
    """Shows nothing."""

    def opened(self, run: RunHandle) -> None:
        """Nothing is drawn."""

    def refresh(self) -> None:
        """Nothing is drawn."""

    follow = show = opened
    closed = refresh
    shows_failure = False


class FrontEnd(Protocol):
    """A view of a run for a person; it reads the run's state and holds none of it."""

    @property
    def shows_failure(self) -> bool:
        """Whether a person sees a failure of the run in this view."""

    def opened(self, run: RunHandle) -> None:
        """Somebody waits for the run from now on, in the cell that runs at this moment."""

    def refresh(self) -> None:
        """Draw what is new; called some times a second from the waiting thread."""

    def closed(self) -> None:
        """Nobody waits any more: draw the last."""

    def follow(self, run: RunHandle) -> None:
        """Show the run in the cell that runs at this moment, and go on by oneself until it is over; returns at once."""

    def show(self, run: RunHandle) -> None:
        """Show the run in the cell that runs at this moment as well, during the run or after it; returns at once."""


class Refreshable(Protocol):
    """Something that is drawn again and again."""

    def refresh(self) -> None:
        """Draw what is new."""

    def closed(self) -> None:
        """Draw the last."""


def keep_drawing(front_end: Refreshable, run: RunHandle) -> threading.Thread:
    """Refresh a front end until its run is over, then close it, in a thread of its own; returns at once."""

    def draw() -> None:
        pause = threading.Event()
        while not run.done:
            pause.wait(_BETWEEN_REFRESHES)
            front_end.refresh()
        front_end.closed()

    # ipykernel knows by the context which cell a thread's output belongs to
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(draw,), name="accelerate_nb panel", daemon=True)
    thread.start()
    return thread


class BackgroundRefresh:
    """A pair of functions that draw while nobody waits."""

    def __init__(self, refresh: Callable[[], None], closed: Callable[[], None]) -> None:
        self.refresh, self.closed = refresh, closed
