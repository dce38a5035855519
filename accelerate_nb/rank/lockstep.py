"""Threads of one process that do something one after the other, all at the same point of their programs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from accelerate_nb.rank_local import RankLocal


class Lockstep:
    """
    A barrier that several ranks of a process pass together: each waits until all have come, and goes on when all have had their turn.

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
        self._wait_for_all()
        with self._turn:
            yield
        self._wait_for_all()

    def leave(self) -> None:
        """Leave: this rank will not come any more."""
        with self._changed:
            self._left = True
            self._changed.notify_all()

    def _wait_for_all(self) -> None:
        # no threading.Barrier: one that is aborted fails also those that have arrived and are not awake yet
        with self._changed:
            all_arrived = self._meetings
            # whoever comes once more, from a `finally` or after it has caught the error, is not counted as another rank
            if not self._left:
                self._come += 1
            if self._come == self._ranks:
                self._come, self._meetings = 0, all_arrived + 1
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._left or self._meetings > all_arrived)
            if self._meetings == all_arrived:
                raise ConnectionResetError(
                    "connection closed: a rank that is a thread of the same process has failed, or returned, and the devices "
                    "of one process compute together. All ranks have to come to the same steps."
                )


_lockstep: RankLocal[Lockstep | None] = RankLocal(lambda: None)


def keep(lockstep: Lockstep | None) -> None:
    """Have this rank pass its steps together with the others that keep the same."""
    _lockstep.set(lockstep)


def lockstep() -> Lockstep | None:
    """This rank's lockstep with others of its process; `None` where it need not wait for any."""
    return _lockstep.get()
