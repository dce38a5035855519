"""A stop request to this process while its function runs: to stop at a boundary that all ranks share."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from accelerate_nb.errors import StopRequested
from accelerate_nb.events.model import StateChange
from accelerate_nb.rank.event_sink import emit, outlet
from accelerate_nb.rank.first_step import report_first_step
from accelerate_nb.rank_local import RankLocal

# How long a rank waits at a boundary to learn which one is the last; the reply takes milliseconds.
_TIMEOUT = 30.0


class TrainingPosition(NamedTuple):
    """
    A rank's progress: optimizer steps made, seconds from one boundary to the next so far (0 before the first), whether its
    function checks for a stop itself, whether it is saving at this moment, and how often it checked without a step before.
    """

    steps: int
    pace: float
    checks: bool
    saves: bool = False
    stepless_checks: int = 0


class StopPoint(NamedTuple):
    """The point where a rank stops: after so many steps, or so many checks without a step, by an exception or by itself."""

    steps: int
    raises: bool
    stepless_checks: int | None = None


class StopRequest:
    """
    A requested stop, between the thread that receives it and the one that trains.

    Nobody knows at which step the other ranks are, and to agree on one in every step would cost a collective. So a rank
    that is to hold reports how many steps it has made, and waits at the end of the one that it is in; the kernel replies
    with the last step of all, which is one more than the farthest rank has made, and each goes on until it has made that.
    Whoever waits in a collective for a rank that holds is waited for no longer than the reply takes.

    Where a function checks for a stop and makes no steps, in an evaluation or with optimizers that are not prepared, its checks
    are counted and agreed on in the same way, and a rank stops at whichever it comes to first. A check that follows a step, or
    stands in the midst of one, is none of these: the loop is to end after a whole step.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.reset()

    def reset(self) -> None:
        """Forget the request and the steps."""
        self.steps = 0
        self.stopped_at: str | None = None
        self.checks = False
        self._stepless_checks = 0
        self._begun: float | None = None
        self._stepped_at = 0.0
        self._checked_at = 0.0
        self._longest_check_gap = 0.0
        self._is_after_step = False
        self._is_in_step = False
        self._saving = 0
        self._is_requested = False
        self._last: StopPoint | None = None

    # ------------------------------------------------------------------------------------------- the thread that trains

    def begin(self) -> None:
        """Note that steps are going to be made in this process."""
        if self._begun is None:
            self._begun = time.monotonic()

    def stepped(self) -> None:
        """Count a step; returns when the process may go on, raises `StopRequested` where it ends."""
        self._stepped_at = time.monotonic()
        self._is_in_step, self._is_after_step = False, True
        self.steps += 1
        report_first_step()
        if self._is_requested:
            self._hold(f"after step {self.steps}")

    def went_backward(self) -> None:
        """Note a backward: the next step has begun, where this process makes steps."""
        self._is_in_step = self._begun is not None

    def checked(self) -> bool:
        """Whether the function is to stop; returns when it may go on."""
        before, self._checked_at = self._checked_at, time.monotonic()
        if self._is_after_step or self._is_in_step:
            self._is_after_step = False
        else:
            if before:
                self._longest_check_gap = max(self._longest_check_gap, self._checked_at - before)
            self._stepless_checks += 1
        self.checks = True
        if self._is_requested:
            self._hold("at stop_requested")
        return self.stopped_at is not None

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A block that writes what was trained, and is not to be cut off for a stop."""
        self._saving += 1
        try:
            yield
        finally:
            self._saving -= 1

    def _hold(self, where: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._last is not None or not self._is_requested, _TIMEOUT)
            last = self._last
            if last is None or not self._has_come_to(last):
                return
            self._is_requested, self.stopped_at = False, where
        if (listener := outlet()) is not None:
            emit(StateChange(listener.rank, "stopping", time.time(), where))
        if last.raises:
            raise StopRequested(f"a stop was requested, and every rank has come to it: {where}")

    def _has_come_to(self, last: StopPoint) -> bool:
        made = last.stepless_checks is not None and self._stepless_checks >= last.stepless_checks
        return made or self.steps >= last.steps

    # --------------------------------------------------------------------------------------------- the thread that receives

    def hold(self) -> TrainingPosition | None:
        """Let the process wait at its next boundary; how far it is, or `None` where it makes no steps and does not check."""
        with self._changed:
            if self._begun is None and not self.checks:
                return None
            # first the request, then the position: whoever has made more steps than are reported has seen it
            self._is_requested = True
            steps, checks = self.steps, self._stepless_checks
            # what comes after the steps, an evaluation perhaps, is none of their time
            pace = (self._stepped_at - self._begun) / steps if steps and self._begun is not None else 0.0
            # samples take longer or shorter, and of the first check nothing is known but its time
            check_gap = self._longest_check_gap or (time.monotonic() - self._checked_at if checks else 0.0)
            return TrainingPosition(steps, max(pace, check_gap), self.checks, self._saving > 0, checks)

    def until(self, last: StopPoint) -> None:
        """Let the process go on, and stop there: by `StopRequested`, or as its function sees to it."""
        with self._changed:
            self._last = last
            self._changed.notify_all()

    def __reduce__(self) -> tuple[Any, ...]:
        # an optimizer that refers to this one may be copied, and be loaded in another process
        return current_stop_request, ()


_stop_requests = RankLocal(StopRequest)


def current_stop_request() -> StopRequest:
    """The stop request of this rank."""
    return _stop_requests.get()
