"""One task of a session, followed until every rank has replied."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from accelerate_nb.events.model import Failure
from accelerate_nb.events.run_state import RunState
from accelerate_nb.failures.exception_copy import raise_as_it_is
from accelerate_nb.launching.front_end import RunHandle
from accelerate_nb.launching.run_context import Stop

# How often whoever waits may draw.
_BETWEEN_REFRESHES = 0.1


@dataclass(frozen=True, slots=True)
class CellResult:
    """
    The result of a cell on one rank.

    `result` is the MIME bundle of its last expression (`None` where it has none) and `metadata` what goes with it, `value` what was pulled, or returned by
    a call; `seconds` is the worker's own time. Where it is not `ok` there is a `failure`, and the exception itself in
    `error`, where it could travel. `left_out` names the part of a returned value that can't travel, and `value` is `None` then.
    """

    rank: int
    ok: bool
    seconds: float
    result: dict[str, Any] | None = None
    value: Any = None
    failure: Failure | None = None
    error: BaseException | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    left_out: str = ""


class CellHost(RunHandle, Protocol):
    """A session as its cells see it."""

    def interrupt(self, cell: CellRun) -> None:
        """Interrupt a cell's ranks."""


class CellRun:
    """
    A cell that runs in a session's workers; `Session.run` gives one. It can be watched like a run.

    `cursor` is where its output begins: `cell.view.since(cell.cursor)`. When it is `done`, all that the cell printed and
    showed is in the view. `metrics_cursor` is where its numbers begin.

    >>> cell = session.run("loss.item()", name="Cell In[3]")
    >>> [end.result for end in cell.wait()]
    """

    def __init__(self, home: CellHost, name: str, ranks: Sequence[int], number: int) -> None:
        self.name, self.ranks, self.number = name, tuple(ranks), number
        self.started = time.time()
        self.cursor, self.metrics_cursor = home.view.since(0).cursor, home.view.metrics_since(0).cursor
        self._home = home
        self._ends: dict[int, CellResult] = {}
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._interrupts = 0

    # ------------------------------------------------------------------------------------------------------ reading

    @property
    def view(self) -> RunState:
        """Everything that has happened in the session so far, also before this cell."""
        return self._home.view

    @property
    def folder(self) -> Path:
        """The folder with every rank's output."""
        return self._home.folder

    @property
    def why(self) -> str:
        """The number of workers, what placed them, and why."""
        return self._home.why

    @property
    def done(self) -> bool:
        """Whether every rank has ended the cell, or the session has ended."""
        return self._over.is_set()

    @property
    def ends(self) -> tuple[CellResult, ...]:
        """The results of the ranks that have ended the cell, in the order of ranks."""
        return tuple(self._ends[rank] for rank in sorted(self._ends))

    @property
    def error(self) -> BaseException | None:
        """
        The exception that `wait` raises, once the cell is done; `None` where all is well.

        A `WorkerError` that is also of the class that the worker raised, a `HangError`, or a `KeyboardInterrupt`.
        """
        return self._error

    @property
    def was_interrupted(self) -> bool:
        """Whether an interrupt was requested."""
        return self._interrupts > 0

    def log_file(self, rank: int) -> Path:
        """The file that holds all that a rank wrote so far in the session."""
        return self._home.log_file(rank)

    # ------------------------------------------------------------------------------------------------------- acting

    def wait(self, refresh: Callable[[], None] = lambda: None, *, throw: bool = True) -> tuple[CellResult, ...]:
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
                self.request_stop("interrupt")
        if throw and self._error is not None:
            raise_as_it_is(self._error)
        return self.ends

    def interrupt(self) -> None:
        """Interrupt the cell on every rank that still runs it, without waiting; the session goes on."""
        if not self.done:
            self._interrupts += 1
            self._home.interrupt(self)

    def request_stop(self, how: Stop) -> None:
        """Request the end of the cell: an interrupt; one more, or a kill, ends the session."""
        if self.done:
            return
        if how == "kill" or self._interrupts:
            self._home.request_stop("kill")
        else:
            self.interrupt()

    def set_knob(self, name: str, value: float) -> None:
        """Change a knob of the training that runs, on all ranks after the same optimizer step (`Run.set_knob`)."""
        self._home.set_knob(name, value)

    def profile(self, steps: int = 10, ranks: Iterable[int] | None = None) -> None:
        """Have ranks of the cell, by default all, profile their next optimizer steps (`Run.profile`)."""
        self._home.profile(steps, self.ranks if ranks is None else ranks)

    def stacks(self) -> str:
        """The stack of every rank, with the lines of the cells; takes up to some seconds."""
        return self._home.stacks()

    # ------------------------------------------------------------------------------------------- what the session does

    def take(self, end: CellResult) -> bool:
        """Take the result of a rank; whether it was the last."""
        self._ends[end.rank] = end
        return len(self._ends) == len(self.ranks)

    def finish(self, error: BaseException | None) -> None:
        """End the cell with `error`, or with success."""
        self._error = error
        self._over.set()
