"""One thing that a session was asked to do, followed until every rank has answered."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

from accelerate_nb.events.model import Failure
from accelerate_nb.events.view import RunView
from accelerate_nb.launching.attempt import Stop

# How often whoever waits may draw.
_BETWEEN_REFRESHES = 0.1


@dataclass(frozen=True, slots=True)
class CellEnd:
    """
    How a rank ended a cell.

    `result` is the MIME bundle of its last expression (`None` where it has none) and `metadata` what goes with it, `value` what was pulled, or returned by
    a call; `seconds` is the worker's own time. Where it is not `ok` there is a `failure`, and the exception itself in
    `error`, where it could travel.
    """

    rank: int
    ok: bool
    seconds: float
    result: dict[str, Any] | None = None
    value: Any = None
    failure: Failure | None = None
    error: BaseException | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Home(Protocol):
    """What a cell needs of its session."""

    @property
    def view(self) -> RunView:
        """Everything that has happened so far."""

    @property
    def folder(self) -> Path:
        """Where every rank's output is kept."""

    @property
    def why(self) -> str:
        """How many workers there are, what placed them, and why."""

    def log_file(self, rank: int) -> Path:
        """The file that holds all that a rank wrote so far."""

    def stacks(self) -> str:
        """Where every rank is now."""

    def interrupt(self, cell: CellRun) -> None:
        """Interrupt a cell's ranks."""

    def kill(self) -> None:
        """End every worker at once."""


class CellRun:
    """
    A cell that runs in a session's workers; `Session.run` gives one. It can be watched like a run.

    `cursor` is where its output begins: `cell.view.since(cell.cursor)`. When it is `done`, all that the cell printed and
    showed is in the view. `metrics_cursor` is where its numbers begin.

    >>> cell = session.run("loss.item()", name="Cell In[3]")
    >>> [end.result for end in cell.wait()]
    """

    def __init__(self, home: Home, name: str, ranks: Sequence[int], number: int) -> None:
        self.name, self.ranks, self.number = name, tuple(ranks), number
        self.started = time.time()
        self.cursor, self.metrics_cursor = home.view.since(0).cursor, home.view.metrics_since(0).cursor
        self._home = home
        self._ends: dict[int, CellEnd] = {}
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._interrupts = 0

    # ------------------------------------------------------------------------------------------------------ reading

    @property
    def view(self) -> RunView:
        """Everything that has happened in the session so far, also before this cell."""
        return self._home.view

    @property
    def folder(self) -> Path:
        """Where every rank's output is kept."""
        return self._home.folder

    @property
    def why(self) -> str:
        """How many workers there are, what placed them, and why."""
        return self._home.why

    @property
    def done(self) -> bool:
        """Whether every rank has ended the cell, or the session has ended."""
        return self._over.is_set()

    @property
    def ends(self) -> tuple[CellEnd, ...]:
        """How the ranks that have ended the cell did so, in the order of ranks."""
        return tuple(self._ends[rank] for rank in sorted(self._ends))

    @property
    def error(self) -> BaseException | None:
        """
        What `wait` raises, once the cell is done; `None` where all is well.

        A `WorkerError` that is also of the class that the worker raised, a `HangError`, or a `KeyboardInterrupt`.
        """
        return self._error

    @property
    def was_interrupted(self) -> bool:
        """Whether somebody has asked for an interrupt."""
        return self._interrupts > 0

    def log_file(self, rank: int) -> Path:
        """The file that holds all that a rank wrote so far in the session."""
        return self._home.log_file(rank)

    # ------------------------------------------------------------------------------------------------------- acting

    def wait(self, refresh: Callable[[], None] = lambda: None, *, throw: bool = True) -> tuple[CellEnd, ...]:
        """
        Wait until the cell is done, calling `refresh` some ten times a second and once at the end; how each rank ended.

        An interrupt (`KeyboardInterrupt`) of this process interrupts the cell, and a second one ends the session. Raises
        `error`, where there is one; with `throw=False` it is left to the caller.
        """
        __tracebackhide__ = True  # IPython shows the person's own frames alone
        while not self._over.is_set():
            try:
                self._over.wait(_BETWEEN_REFRESHES)
                refresh()
            except KeyboardInterrupt:
                self.ask("interrupt")
        if throw and self._error is not None:
            _raise(self._error)
        return self.ends

    def interrupt(self) -> None:
        """Interrupt the cell on every rank that still runs it, without waiting; the session goes on."""
        if not self.done:
            self._interrupts += 1
            self._home.interrupt(self)

    def ask(self, how: Stop) -> None:
        """Ask for the end of the cell: an interrupt; one more, or a kill, ends the session."""
        if self.done:
            return
        if how == "kill" or self._interrupts:
            self._home.kill()
        else:
            self.interrupt()

    def stacks(self) -> str:
        """Where every rank is now, with the lines of the cells; takes up to some seconds."""
        return self._home.stacks()

    # ------------------------------------------------------------------------------------------- what the session does

    def take(self, end: CellEnd) -> bool:
        """A rank has ended; whether it was the last."""
        self._ends[end.rank] = end
        return len(self._ends) == len(self.ranks)

    def finish(self, error: BaseException | None) -> None:
        """Nothing more will come; `error` is what the cell comes to."""
        self._error = error
        self._over.set()


def _raise(error: BaseException) -> NoReturn:
    """Raise what became of the cell, in the process that waits for it."""
    raise error
