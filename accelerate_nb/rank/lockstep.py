"""Threads of one process that do something one after the other, all at the same point of their programs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from accelerate_nb.own import Own


class Lockstep:
    """
    What several ranks of a process pass together: each waits until all have come, and goes on when all have had their turn.

    Where one of them has left, because it failed or its function returned, the others can't go on: they get a
    `ConnectionResetError`, which is a consequence of a failure and never its cause.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._changed = threading.Condition()
        self._turn = threading.Lock()
        self._come = self._meetings = 0
        self._left = False

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A block that every rank enters, one at a time; no rank leaves it before all have been there."""
        self._meet()
        with self._turn:
            yield
        self._meet()

    def leave(self) -> None:
        """Say that a rank will not come any more."""
        with self._changed:
            self._left = True
            self._changed.notify_all()

    def _meet(self) -> None:
        # no threading.Barrier: one that is aborted fails also those that have met and are not awake yet
        with self._changed:
            meeting = self._meetings
            # whoever comes once more, from a `finally` or after it has caught the error, is not counted as another rank
            if not self._left:
                self._come += 1
            if self._come == self._ranks:
                self._come, self._meetings = 0, meeting + 1
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._left or self._meetings > meeting)
            if self._meetings == meeting:
                raise ConnectionResetError(
                    "connection closed: a rank that is a thread of the same process has failed, or returned, and the devices "
                    "of one process compute together. All ranks have to come to the same steps."
                )


class _Holder:
    """What a rank passes together with others."""

    lockstep: Lockstep | None = None


_holder = Own(_Holder)


def keep(lockstep: Lockstep | None) -> None:
    """From now on this rank passes its steps together with the others that keep the same."""
    _holder.get().lockstep = lockstep


def lockstep() -> Lockstep | None:
    """What this rank passes together with others of its process; `None` where it need not wait for any."""
    return _holder.get().lockstep
