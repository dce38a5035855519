"""Objects of one rank: of a process, or of one of several ranks that share a process as threads."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from typing import Any, Generic, TypeVar

T = TypeVar("T")

# One dictionary for all threads of a process, since a ContextVar's value is not inherited by them; a rank that is a thread
# among others begins in a context with a dictionary of its own.
_objects: ContextVar[dict[Any, Any]] = ContextVar("accelerate_nb_rank_objects", default={})  # noqa: B039 - shared on purpose


class RankLocal(Generic[T]):
    """
    One object a rank, made at the first `get`.

    >>> saves = RankLocal(list)
    >>> saves.get().append(1)
    >>> saves.get(), alone().run(saves.get)
    ([1], [])
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make

    def get(self) -> T:
        """This rank's object."""
        objects = _objects.get()
        try:
            return objects[self]  # type: ignore[no-any-return]  # kept under its maker
        except KeyError:
            # two threads of one rank may get it at once, and get the same
            return objects.setdefault(self, self._make())  # type: ignore[no-any-return]

    def set(self, value: T) -> None:
        """Give this rank another object."""
        _objects.get()[self] = value


def alone() -> Context:
    """A context for another rank of this process: nothing that is a rank's own is shared with this one."""
    context = copy_context()
    context.run(_objects.set, {})
    return context


def enter(rank: int) -> bool:
    """Make this thread that rank's, among several of this process; `False` if it belongs to one of them already."""
    everyones = Context().run(_objects.get)
    if _objects.get() is not everyones:
        return False
    _objects.set(everyones.setdefault(("rank", rank), {}))
    return True
