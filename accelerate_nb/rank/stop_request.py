"""What is asked of this process while its function runs: to stop, after a step that all ranks share."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from accelerate_nb.errors import StopRequested
from accelerate_nb.events.emit import emit, outlet
from accelerate_nb.events.model import StateChange
from accelerate_nb.own import Own

# How long a rank waits at the end of a step to be told which one is the last; the answer takes milliseconds.
_PATIENCE = 30.0


class Position(NamedTuple):
    """
    How far a rank is: optimizer steps made, seconds that one took so far (0 before the first), whether its function looks
    for a stop itself, and whether it is saving at this moment.
    """

    steps: int
    pace: float
    looks: bool
    saves: bool = False


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
        self._stepped_at = 0.0
        self._saving = 0
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
        self._stepped_at = time.monotonic()
        self.steps += 1
        if self._asked:
            self._hold()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A block that writes what was trained, and is not to be cut off for a stop."""
        self._saving += 1
        try:
            yield
        finally:
            self._saving -= 1

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
            begun = self._begun
            # first the wish, then the look: whoever has made more steps than are told has seen it
            self._asked = True
            steps = self.steps
            # what comes after the steps, an evaluation perhaps, is none of their time
            pace = (self._stepped_at - begun) / steps if steps else 0.0
            return Position(steps, pace, self.looks, self._saving > 0)

    def until(self, last: int, *, raises: bool) -> None:
        """Let the process go on, and stop after so many steps: by `StopRequested`, or as its function sees to it."""
        with self._changed:
            self._last, self._raises = last, raises
            self._changed.notify_all()

    def __reduce__(self) -> tuple[Any, ...]:
        # an optimizer that refers to this one may be copied, and be loaded in another process
        return current_asks, ()


_asks = Own(Asks)


def current_asks() -> Asks:
    """What is asked of this rank."""
    return _asks.get()
