"""Random numbers of a notebook and of its ranks, drawn in one process: each goes on where it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

from accelerate_nb.devices.randomness import RandomStates, random_states_here

Side: TypeAlias = Literal["notebook", "ranks"]


def session_begins() -> None:
    """From here on the ranks draw for themselves; they begin where the notebook is. A second call does nothing."""
    _streams.get().begin()


def on_ranks(*, also_here: bool = False) -> None:
    """
    What follows draws the ranks' numbers.

    With `also_here` the notebook does the same: where something is drawn or seeded, its numbers go on from there, too.

    >>> on_ranks()
    """
    streams = _streams.get()
    streams.turn("ranks")
    streams.shared = random_states_here(gpus=True) if also_here else None


def in_the_notebook() -> None:
    """
    What follows draws the notebook's numbers.

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
class _Streams:
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
            self.waiting = random_states_here()
        return self.waiting

    def turn(self, side: Side) -> None:
        self._end_of_shared()
        waiting = self.begin()
        if side == self.side:
            return
        here = random_states_here(gpus=True)
        waiting.install()
        self.side, self.waiting = side, here

    def _end_of_shared(self) -> None:
        if self.shared is None or self.waiting is None:
            return
        now = random_states_here(gpus=True)
        states = {
            one.name: getattr(
                self.waiting if _same(getattr(self.shared, one.name), getattr(now, one.name)) else now, one.name
            )
            for one in fields(RandomStates)
        }
        self.shared, self.waiting = None, RandomStates(**states)


_streams: ContextVar[_Streams] = ContextVar("streams", default=_Streams())  # noqa: B039 - one for all threads and tasks


def _same(one: Any, other: Any) -> bool:
    """Whether two states of a generator are equal: numbers and arrays, nested in tuples and lists."""
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    equal = one == other
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)
