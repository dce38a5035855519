"""A stop that was asked for, as the kernel sees it: how far each rank is, which step is the last, how long one waits for it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from accelerate_nb.events.asks import Position

# A rank that is far behind, or in a long step, gets so many times the time that a step took so far.
_STEPS_OF_PATIENCE = 3
# A rank that is in the midst of saving gets so many seconds: to cut it off would lose what a stop is to keep.
_SAVING = 300.0


@dataclass
class Asking:
    """
    Ranks that were asked to hold: their answers, and what follows from them.

    >>> asking = Asking(ranks=[0, 1], grace=2.0, now=0.0)
    >>> asking.answer(0, Position(steps=7, pace=0.1, looks=False), now=0.0)
    >>> asking.answer(1, Position(steps=8, pace=0.1, looks=False), now=0.0)
    >>> asking.last_step
    9
    """

    ranks: Collection[int]
    grace: float
    now: float
    last_step: int | None = None
    _positions: dict[int, Position] = field(default_factory=dict)
    _has_steps: bool = True
    _came: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._deadline = self.now + self.grace

    def answer(self, rank: int, position: Position | None, now: float) -> None:
        """A rank told how far it is; `None` is one that makes no steps, or is in no state to tell."""
        if position is None:
            self._has_steps = False
            return
        self._positions[rank] = position
        if set(self._positions) == set(self.ranks):
            self.last_step = 1 + max(one.steps for one in self._positions.values())
            pace = max(one.pace for one in self._positions.values())
            saving = _SAVING if any(one.saves for one in self._positions.values()) else 0.0
            self._deadline = now + self.grace + max(saving, _STEPS_OF_PATIENCE * pace)

    @property
    def raises(self) -> bool:
        """Whether the last step ends in an exception: so it does unless every rank's function looks for the stop itself."""
        return not all(one.looks for one in self._positions.values())

    @property
    def came_to_it(self) -> bool:
        """Whether some rank has made the last step."""
        return bool(self._came)

    def come(self, rank: int) -> None:
        """A rank has made the last step."""
        self._came.add(rank)

    def is_in_vain(self, ended: Iterable[int], now: float) -> bool:
        """Whether the ranks have to be ended by force; never once all have come, who may take their time to save."""
        if not self._has_steps:
            return True
        return now > self._deadline and not set(self.ranks) <= self._came.union(ended)
