"""Requests to ranks while they train: to stop, or to change a knob, after the same step, and to profile the next ones."""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from accelerate_nb.config.rank_lists import of_ranks
from accelerate_nb.errors import ConfigurationError, StateError
from accelerate_nb.events.event_types import Event, HeldAt
from accelerate_nb.events.run_state import RunState
from accelerate_nb.rank.step_hold import HOLD_TIMEOUT, StopPoint, checked_change
from accelerate_nb.transport.messages import ChangeKnobAfter, HoldAtStep, RankMessage

# A rank that is far behind, or in a long step, gets so many times the time that a step took so far.
_EXTRA_STEPS = 3
# Ranks that are so many checks apart don't wait for each other in between, each loops by itself: each stops where it is.
_APART = 16
# A rank that is in the midst of saving gets so many seconds: to cut it off would lose what a stop is to keep.
_SAVING = 300.0
# Ranks wait longer than this for the step, so that what is sent within it comes in time to all of them.
_TIMEOUT = HOLD_TIMEOUT - 1.5
_MOST_STEPS = 100


@dataclass
class StopNegotiation:
    """Ranks that were sent a request to hold: their replies, and what follows from them."""

    ranks: Collection[int]
    stop_grace_period: float
    now: float
    last_step: int | None = None
    _positions: dict[int, HeldAt] = field(default_factory=dict)
    _has_boundaries: bool = True
    # the ranks that have reached their stop points
    stopped: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._deadline = self.now + self.stop_grace_period

    def reply(self, rank: int, position: HeldAt | None, now: float) -> None:
        """Take a rank's reply, its position; `None` where it can't reply."""
        if position is None or not position.has_boundary:
            self._has_boundaries = False
            return
        self._positions[rank] = position
        if set(self._positions) == set(self.ranks):
            self.last_step = 1 + max(other.steps or 0 for other in self._positions.values())
            saving = _SAVING if any(other.saves for other in self._positions.values()) else 0.0
            behind = [
                (_EXTRA_STEPS + self._last_check(other) - 1 - other.stepless_checks) * other.pace
                for other in self._positions.values()
            ]
            self._deadline = now + self.stop_grace_period + max(saving, *behind)

    def stop_point_of(self, rank: int) -> StopPoint:
        """A rank's stop point, once all have replied: its last step or, where every function checks, its last check."""
        assert self.last_step is not None, "a stop point is sent after all have replied"
        checks = None if self.raises else self._last_check(self._positions[rank])
        return StopPoint(self.last_step, self.raises, checks)

    def _last_check(self, position: HeldAt) -> int:
        checks = [other.stepless_checks for other in self._positions.values()]
        return 1 + (max(checks) if max(checks) - min(checks) <= _APART else position.stepless_checks)

    @property
    def raises(self) -> bool:
        """Whether the last step ends in an exception: so it does unless every rank's function checks for the stop itself."""
        return not all(position.checks for position in self._positions.values())

    def needs_force(self, ended: Iterable[int], now: float) -> bool:
        """Whether the ranks have to be ended by force; never once all have come, who may take their time to save."""
        if not self._has_boundaries:
            return True
        return now > self._deadline and not set(self.ranks) <= {*self.stopped, *ended}


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

    def __init__(self, view: RunState, send: Callable[[int, RankMessage], None]) -> None:
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
        if not isinstance(event, HeldAt):
            return
        with self._lock:
            change = self._open
            if change is None or event.number != change.number:
                return
            change.steps[event.rank] = event.steps
            if change.steps.keys() >= change.ranks:
                self._open = None
                steps = [made for made in change.steps.values() if made is not None]
                can_all = len(steps) == len(change.steps) and time.monotonic() - change.began < _TIMEOUT
                after = 1 + max(steps) if can_all else None
                for rank in sorted(change.ranks):
                    self._send(rank, ChangeKnobAfter(change.number, change.name, change.value, after))
                self._begin_next()

    def _begin_next(self) -> None:
        if not self._waiting:
            return
        self._count += 1
        ranks = frozenset(glance.rank for glance in self._view.glances() if glance.state == "running")
        self._open = _Change(self._count, *self._waiting.popleft(), ranks, time.monotonic())
        for rank in sorted(ranks):
            self._send(rank, HoldAtStep(rank, self._count))


def checked_ranks(view: RunState, steps: object, ranks: Iterable[int] | None) -> tuple[int, ...]:
    """The ranks that are to profile so many steps; raises `ConfigurationError` or `StateError`."""
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= _MOST_STEPS:
        raise ConfigurationError(f"A profile of {steps!r} steps was requested. Profile 1 to {_MOST_STEPS} steps.")
    known = {summary.rank: summary for summary in view.glances()}
    running = [rank for rank, summary in known.items() if summary.state == "running"]
    chosen = running if ranks is None else sorted(set(ranks))
    if unknown := [rank for rank in chosen if rank not in known]:
        raise ConfigurationError(
            f"A profile of {of_ranks(unknown)} was requested, and this run has {of_ranks(sorted(known))}. Name ranks of it."
        )
    ended = [rank for rank in chosen if rank not in running]
    if view.state != "running" or ended or not chosen:
        state = f"{of_ranks(ended)} of it {'is' if len(ended) == 1 else 'are'} not running" if ended else "no rank runs"
        found = f"the run is {view.state}" if view.state != "running" else state
        raise StateError(f"A profile was requested, and {found}. Profile ranks while they train.")
    if busy := [rank for rank in chosen if known[rank].requested_profile is not None]:
        raise StateError(
            f"A profile was requested, and that of {of_ranks(busy)} is under way. Request another when its table is there."
        )
    return tuple(chosen)
