"""A front end that refreshes in the background, beside whatever the notebook does next."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Protocol

from accelerate_nb.launching.front_end import RunHandle

_BETWEEN_REFRESHES = 0.1


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
