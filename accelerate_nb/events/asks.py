"""What is asked of this process while its function runs: to stop, after a step that all ranks share."""

from __future__ import annotations

import threading
import time
from contextvars import ContextVar
from typing import Any, NamedTuple

from accelerate_nb.errors import StopRequested
from accelerate_nb.events.emit import emit, outlet
from accelerate_nb.events.model import StateChange

# How long a rank waits at the end of a step to be told which one is the last; the answer takes milliseconds.
_PATIENCE = 30.0


class Position(NamedTuple):
    """How far a rank is: optimizer steps made, seconds that one took so far, whether its function looks for a stop itself."""

    steps: int
    pace: float
    looks: bool


class Asks:
    """
    A stop that was asked for, between the thread that hears of it and the one that trains.

    Nobody knows at which step the other ranks are, and to agree on one in every step would cost a collective. So a rank
    that is asked to hold says how many steps it has made, and waits at the end of the one that it is in; the kernel answers
    with the last step of all, which is one more than the farthest rank has made, and each goes on until it has made that.
    Whoever waits in a collective for a rank that holds is waited for no longer than the answer takes.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.reset()

    def reset(self) -> None:
        """Nothing is asked, and no step was made."""
        self.steps = 0
        self.stopping = False
        self.looks = False
        self._begun: float | None = None
        self._asked = False
        self._last: int | None = None
        self._raises = False

    # ------------------------------------------------------------------------------------------- the thread that trains

    def begin(self) -> None:
        """Steps are going to be made here."""
        if self._begun is None:
            self._begun = time.monotonic()

    def stepped(self) -> None:
        """A step has been made; comes back when the process may go on, raises `StopRequested` where it ends."""
        self.steps += 1
        if self._asked:
            self._hold()

    def _hold(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._last is not None or not self._asked, _PATIENCE)
            if self._last is None or self.steps < self._last:
                return
            self._asked, self.stopping = False, True
        where = f"after step {self.steps}"
        if (listener := outlet()) is not None:
            emit(StateChange(listener.rank, "stopping", time.time(), where))
        if self._raises:
            raise StopRequested(f"a stop was asked for, and every rank is here: {where}")

    # --------------------------------------------------------------------------------------------- the thread that hears

    def hold(self) -> Position | None:
        """Let the process wait at the end of its step; how far it is, or `None` where it makes no steps."""
        with self._changed:
            if self._begun is None:
                return None
            # first the wish, then the look: whoever has made more steps than are told has seen it
            self._asked = True
            steps = self.steps
            return Position(steps, (time.monotonic() - self._begun) / max(steps, 1), self.looks)

    def until(self, last: int, *, raises: bool) -> None:
        """Let the process go on, and stop after so many steps: by `StopRequested`, or as its function sees to it."""
        with self._changed:
            self._last, self._raises = last, raises
            self._changed.notify_all()

    def __reduce__(self) -> tuple[Any, ...]:
        # an optimizer that refers to this one may be copied, and be loaded in another process
        return current_asks, ()


_asks: ContextVar[Asks] = ContextVar("accelerate_nb_asks", default=Asks())  # noqa: B039 - shared by all threads


def current_asks() -> Asks:
    """What is asked of this process."""
    return _asks.get()
