"""The kernel's side of a knob's change: how far each rank is, and the step that all change after."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from accelerate_nb.errors import StateError
from accelerate_nb.events.model import (
    Event,
    KnobHeld,
)
from accelerate_nb.events.run_state import RunState
from accelerate_nb.rank.knobs import HOLD_TIMEOUT, checked_change
from accelerate_nb.transport.messages import (
    ChangeKnobAfter,
    HoldForKnob,
    Message,
)

# Ranks wait longer than this for the step, so that what is sent within it comes in time to all of them.
_TIMEOUT = HOLD_TIMEOUT - 1.5


@dataclass(slots=True)
class _Change:
    """A change that ranks were asked to hold for, and the steps that each of those has made that replied."""

    number: int
    name: str
    value: float
    ranks: frozenset[int]
    began: float
    steps: dict[int, int | None] = field(default_factory=dict)


class KnobChanges:
    """Changes the knobs of a run's ranks one after the other, each on all ranks after the same step; `send` reaches a rank's inbox."""

    def __init__(self, view: RunState, send: Callable[[int, Message], None]) -> None:
        self._view, self._send = view, send
        # a call in this process replies while it is sent the request
        self._lock = threading.RLock()
        self._count = 0
        self._open: _Change | None = None
        self._waiting: deque[tuple[str, float]] = deque()

    def request(self, name: str, value: float) -> None:
        """Change a knob, from any thread, without waiting for it; raises `ConfigurationError` or `StateError` where that can't be."""
        if self._view.state != "running":
            raise StateError(
                f"Knob {name!r} was to be changed, and the run is {self._view.state}. Knobs change while it runs."
            )
        number = checked_change(self._view.knobs(), name, value)
        with self._lock:
            self._waiting.append((name, number))
            if self._open is None or time.monotonic() - self._open.began > HOLD_TIMEOUT:
                self._begin_next()

    def take(self, event: Event) -> None:
        """Take an event of the run: the replies of ranks are among them."""
        if not isinstance(event, KnobHeld):
            return
        with self._lock:
            change = self._open
            if change is None or event.number != change.number:
                return
            change.steps[event.rank] = event.steps
            if change.steps.keys() >= change.ranks:
                self._open = None
                self._decide(change)
                self._begin_next()

    def _begin_next(self) -> None:
        if not self._waiting:
            return
        self._count += 1
        ranks = frozenset(glance.rank for glance in self._view.glances() if glance.state == "running")
        self._open = _Change(self._count, *self._waiting.popleft(), ranks, time.monotonic())
        for rank in sorted(ranks):
            self._send(rank, HoldForKnob(rank, self._count))

    def _decide(self, change: _Change) -> None:
        steps = [made for made in change.steps.values() if made is not None]
        can_all = len(steps) == len(change.steps) and time.monotonic() - change.began < _TIMEOUT
        after = 1 + max(steps) if can_all else None
        for rank in sorted(change.ranks):
            self._send(rank, ChangeKnobAfter(change.number, change.name, change.value, after))
