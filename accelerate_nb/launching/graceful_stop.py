"""The kernel's side of a graceful stop: how far each rank is, where the last boundary is, how long to wait for it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from accelerate_nb.rank.stop_request import StopPoint, TrainingPosition

# A rank that is far behind, or in a long step, gets so many times the time that a step took so far.
_EXTRA_STEPS = 3
# Ranks that are so many checks apart don't wait for each other in between, each loops by itself: each stops where it is.
_APART = 16
# A rank that is in the midst of saving gets so many seconds: to cut it off would lose what a stop is to keep.
_SAVING = 300.0


@dataclass
class StopNegotiation:
    """
    Ranks that were sent a request to hold: their replies, and what follows from them.

    >>> negotiation = StopNegotiation(ranks=[0, 1], stop_grace_period=2.0, now=0.0)
    >>> negotiation.reply(0, TrainingPosition(steps=7, pace=0.1, checks=False), now=0.0)
    >>> negotiation.reply(1, TrainingPosition(steps=8, pace=0.1, checks=False), now=0.0)
    >>> negotiation.last_step
    9
    """

    ranks: Collection[int]
    stop_grace_period: float
    now: float
    last_step: int | None = None
    _positions: dict[int, TrainingPosition] = field(default_factory=dict)
    _has_boundaries: bool = True
    _stopped: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._deadline = self.now + self.stop_grace_period

    def reply(self, rank: int, position: TrainingPosition | None, now: float) -> None:
        """Take a rank's reply, its position; `None` where it comes to no boundary, or can't reply."""
        if position is None:
            self._has_boundaries = False
            return
        self._positions[rank] = position
        if set(self._positions) == set(self.ranks):
            self.last_step = 1 + max(other.steps for other in self._positions.values())
            saving = _SAVING if any(other.saves for other in self._positions.values()) else 0.0
            longest = max(saving, *map(self._time_to_come, self._positions.values()))
            self._deadline = now + self.stop_grace_period + longest

    def stop_point_of(self, rank: int) -> StopPoint:
        """A rank's stop point, once all have replied: its last step or, where every function checks, its last check."""
        assert self.last_step is not None, "a stop point is sent after all have replied"
        checks = None if self.raises else self._last_check(self._positions[rank])
        return StopPoint(self.last_step, self.raises, checks)

    def _last_check(self, position: TrainingPosition) -> int:
        checks = [other.stepless_checks for other in self._positions.values()]
        return 1 + (max(checks) if max(checks) - min(checks) <= _APART else position.stepless_checks)

    def _time_to_come(self, position: TrainingPosition) -> float:
        behind = self._last_check(position) - 1 - position.stepless_checks
        return (_EXTRA_STEPS + behind) * position.pace

    @property
    def raises(self) -> bool:
        """Whether the last step ends in an exception: so it does unless every rank's function checks for the stop itself."""
        return not all(position.checks for position in self._positions.values())

    @property
    def stopped_at(self) -> str | None:
        """The point at which ranks stopped, in words; `None` before the first has."""
        return next(iter(self._stopped.values()), None)

    def stopped(self, rank: int, where: str) -> None:
        """A rank has reached its stop point."""
        self._stopped[rank] = where

    def needs_force(self, ended: Iterable[int], now: float) -> bool:
        """Whether the ranks have to be ended by force; never once all have come, who may take their time to save."""
        if not self._has_boundaries:
            return True
        return now > self._deadline and not set(self.ranks) <= {*self._stopped, *ended}
