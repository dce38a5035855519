"""The watchdog of a run from which nothing comes: when to warn of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from accelerate_nb.events.model import IdleWarning
from accelerate_nb.failures.hang_report import StackSnapshot, diagnosis, is_at_work, waits_for_returned
from accelerate_nb.launching.run_context import RunContext


@dataclass(slots=True)
class IdleWatchdog:
    """
    Restarts with every message; a warning is due after `timeout` seconds, and then each time that the time has doubled.

    >>> watchdog = IdleWatchdog(timeout=60.0, since=0.0)
    >>> watchdog.is_due(59.0), watchdog.is_due(60.0), watchdog.is_due(61.0), watchdog.is_due(120.0)
    (False, True, False, True)
    """

    timeout: float
    since: float
    _warned_after: float = 0.0

    @property
    def due(self) -> float:
        """The time of the next warning, if nothing is received until then."""
        return self.since + max(self.timeout, 2 * self._warned_after) if self.timeout else float("inf")

    def is_due(self, now: float) -> bool:
        """Whether a warning is due now, which counts as shown then."""
        if now < self.due:
            return False
        self._warned_after = now - self.since
        return True

    def restart(self, now: float) -> bool:
        """Start again, since something was received; whether a warning had been shown."""
        was_warned, self._warned_after, self.since = self._warned_after > 0, 0.0, now
        return was_warned


class IdleObserver:
    """
    Takes a snapshot of the ranks of a run from which nothing comes, in a thread of its own, and warns of it in the run's.

    Where they wait for a rank that has returned, `end_deadlock` is called with it, in the run's thread too.
    """

    def __init__(
        self,
        run_context: RunContext,
        snapshot: Callable[[], StackSnapshot],
        end_deadlock: Callable[[StackSnapshot], None],
    ) -> None:
        self._run_context, self._snapshot, self._end_deadlock = run_context, snapshot, end_deadlock
        self._watchdog = IdleWatchdog(run_context.hang_warning_after, time.monotonic())
        self._thread: threading.Thread | None = None
        self._found: tuple[float, StackSnapshot] | None = None

    @property
    def due(self) -> float:
        """The time of the next warning on the monotonic clock, if nothing is received until then."""
        return self._watchdog.due

    @property
    def is_busy(self) -> bool:
        """Whether a snapshot is being taken."""
        return self._thread is not None and self._thread.is_alive()

    def check(self) -> None:
        """Warn of what the last snapshot shows, and take another where it is due."""
        found, self._found = self._found, None
        if found is not None and found[0] == self._watchdog.since:
            lasts = time.monotonic() - found[0]
            where = diagnosis(found[1], self._run_context.sources)
            self._run_context.take(
                IdleWarning(lasts, f"Nothing has come from any rank for {lasts:.0f} s.\n{where}", time.time())
            )
            if waits_for_returned(found[1]):
                self._end_deadlock(found[1])
        if self._watchdog.is_due(time.monotonic()) and not self.is_busy:
            self._thread = threading.Thread(target=self._observe, name="accelerate_nb observer", daemon=True)
            self._thread.start()

    def restart(self, timeout: float | None = None) -> None:
        """Start again, since something was received; with another `timeout` in seconds where it is given."""
        if timeout is not None:
            self._watchdog.timeout = timeout
        if self._watchdog.restart(time.monotonic()):
            self._run_context.take(IdleWarning(0, "", time.time()))

    def _observe(self) -> None:
        since = self._watchdog.since
        snapshot = self._snapshot()
        if is_at_work(snapshot):
            self._found = since, snapshot
            self._run_context.wake()
