"""What belongs to one rank: to a process, or to one of several ranks that share a process as threads."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from typing import Any, Generic, TypeVar

T = TypeVar("T")

# One dictionary for all threads of a process, since a ContextVar's value is not inherited by them; a rank that is a thread
# among others begins in a context with a dictionary of its own.
_room: ContextVar[dict[Any, Any]] = ContextVar("accelerate_nb_room", default={})  # noqa: B039 - shared on purpose


class Own(Generic[T]):
    """
    One object a rank, made when it is first asked for.

    >>> saves = Own(list)
    >>> saves.get().append(1)
    >>> saves.get(), alone().run(saves.get)
    ([1], [])
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make

    def get(self) -> T:
        """This rank's object."""
        room = _room.get()
        try:
            return room[self]  # type: ignore[no-any-return]  # kept under its maker
        except KeyError:
            # two threads of one rank may ask at once, and get the same
            return room.setdefault(self, self._make())  # type: ignore[no-any-return]


def alone() -> Context:
    """A context for another rank of this process: nothing that is a rank's own is shared with this one."""
    context = copy_context()
    context.run(_room.set, {})
    return context


def enter(rank: int) -> bool:
    """Make this thread that rank's, among several of this process; `False` if it belongs to one of them already."""
    everyones = Context().run(_room.get)
    if _room.get() is not everyones:
        return False
    _room.set(everyones.setdefault(("rank", rank), {}))
    return True
