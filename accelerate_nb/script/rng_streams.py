"""Random numbers of a notebook and of its ranks, drawn in one process: each goes on where it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

from accelerate_nb.rank.rng_state import RandomStates, current_random_states

Side: TypeAlias = Literal["notebook", "ranks"]


def session_begins() -> None:
    """From here on the ranks draw for themselves; they begin where the notebook is. A second call does nothing."""
    _streams.get().begin()


def on_ranks(*, also_here: bool = False) -> None:
    """
    Switch to the ranks' random numbers.

    With `also_here` the notebook does the same: where something is drawn or seeded, its numbers go on from there, too.

    >>> on_ranks()
    """
    streams = _streams.get()
    streams.turn("ranks")
    streams.shared = current_random_states(gpus=True) if also_here else None


def in_the_notebook() -> None:
    """
    Switch to the notebook's random numbers.

    >>> in_the_notebook()
    """
    _streams.get().turn("notebook")


@contextmanager
def drawn_on_ranks() -> Iterator[None]:
    """Inside the block the ranks' numbers are drawn."""
    streams = _streams.get()
    before = streams.side
    streams.turn("ranks")
    try:
        yield
    finally:
        streams.turn(before)


@dataclass
class _RandomStreams:
    """
    Whose numbers are drawn, and where the others wait.

    `shared` is where a cell of both began.
    """

    side: Side = "notebook"
    waiting: RandomStates | None = None
    shared: RandomStates | None = None

    def begin(self) -> RandomStates:
        if self.waiting is None:
            # a rank's process has touched no GPU yet
            self.waiting = current_random_states()
        return self.waiting

    def turn(self, side: Side) -> None:
        self._end_of_shared()
        waiting = self.begin()
        if side == self.side:
            return
        current = current_random_states(gpus=True)
        waiting.install()
        self.side, self.waiting = side, current

    def _end_of_shared(self) -> None:
        if self.shared is None or self.waiting is None:
            return
        now = current_random_states(gpus=True)
        states = {
            field.name: getattr(
                self.waiting if _same(getattr(self.shared, field.name), getattr(now, field.name)) else now, field.name
            )
            for field in fields(RandomStates)
        }
        self.shared, self.waiting = None, RandomStates(**states)


_streams: ContextVar[_RandomStreams] = ContextVar("streams", default=_RandomStreams())  # noqa: B039 - one for all threads and tasks


def _same(item: Any, other: Any) -> bool:
    """Whether two states of a generator are equal: numbers and arrays, nested in tuples and lists."""
    if isinstance(item, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(item) == len(other) and all(map(_same, item, other))
    equal = item == other
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)
