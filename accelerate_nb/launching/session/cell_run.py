"""The cells of a session: sent to its ranks, timed, followed, and ended with the ranks' replies."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate_nb.config.rank_lists import listed, named, of_ranks
from accelerate_nb.config.run_config import RunConfig
from accelerate_nb.errors import ConfigurationError, HangError, LaunchError, StateError
from accelerate_nb.events.model import Failure, TaskDone
from accelerate_nb.events.run_folder import shown_path
from accelerate_nb.events.run_state import RunState
from accelerate_nb.failures.exception_copy import raise_as_it_is
from accelerate_nb.failures.rank_result import RankResult
from accelerate_nb.failures.worker_error import hang_error, worker_error
from accelerate_nb.launching.conductor import Conductor
from accelerate_nb.launching.worker_group import Stop
from accelerate_nb.sources.cells import CellSources, current_sources
from accelerate_nb.transport.memory_file import map_entries, memory_file, write_entries
from accelerate_nb.transport.messages import (
    BeginTask,
    InterruptTask,
)
from accelerate_nb.transport.outcome import unpickling_failure
from accelerate_nb.transport.serializer import dump, explain, is_of_main, load
from accelerate_nb.transport.session_tasks import (
    RETURNED,
    CallFunction,
    PullNames,
    PushNames,
    RunCell,
    Task,
    TaskReply,
    TaskRequest,
)

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


class CellRun:
    """
    A cell that runs in a session's workers; `Session.run` gives one. It can be watched like a run.

    `cursor` is where its output begins: `cell.view.since(cell.cursor)`. When it is `done`, all that the cell printed and
    showed is in the view. `metrics_cursor` is where its numbers begin.

    >>> cell = session.run("loss.item()", name="Cell In[3]")
    >>> [end.result for end in cell.wait()]
    """

    def __init__(self, tasks: TaskDispatcher, name: str, ranks: Sequence[int], number: int) -> None:
        self.name, self.ranks, self.number = name, tuple(ranks), number
        self.started = time.time()
        self._tasks, self._conductor = tasks, tasks.conductor
        self.cursor, self.metrics_cursor = self.view.since(0).cursor, self.view.metrics_since(0).cursor
        self._ends: dict[int, CellResult] = {}
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._interrupts = 0

    # ------------------------------------------------------------------------------------------------------ reading

    @property
    def view(self) -> RunState:
        """Everything that has happened in the session so far, also before this cell."""
        return self._conductor.view

    @property
    def folder(self) -> Path:
        """The folder with every rank's output."""
        return self._conductor.facts.folder

    @property
    def why(self) -> str:
        """The number of workers, what placed them, and why."""
        return self._conductor.facts.why

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
        return self._conductor.log_file(rank)

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
            self._tasks.interrupt(self)

    def request_stop(self, how: Stop) -> None:
        """Request the end of the cell: an interrupt; one more, or a kill, ends the session."""
        if self.done:
            return
        if how == "kill" or self._interrupts:
            self._conductor.request_stop("kill")
        else:
            self.interrupt()

    def set_knob(self, name: str, value: float) -> None:
        """Change a knob of the training that runs, on all ranks after the same optimizer step (`Run.set_knob`)."""
        self._tasks.set_knob(name, value)

    def profile(self, steps: int = 10, ranks: Iterable[int] | None = None) -> None:
        """Have ranks of the cell, by default all, profile their next optimizer steps (`Run.profile`)."""
        self._tasks.profile(steps, self.ranks if ranks is None else ranks)

    def stacks(self) -> str:
        """The stack of every rank, with the lines of the cells; takes up to some seconds."""
        return self._tasks.stacks()

    # ------------------------------------------------------------------------------------------- what the session does

    def take(self, end: CellResult) -> bool:
        """Take the result of a rank; whether it was the last."""
        self._ends[end.rank] = end
        return len(self._ends) == len(self.ranks)

    def finish(self, error: BaseException | None) -> None:
        """End the cell with `error`, or with success."""
        self._error = error
        self._over.set()


# After one rank has failed: how long the others may still come to their own end before they are interrupted.
SETTLE = 0.5
# What an interrupted rank gets, beside `stop_grace_period`, to be freed from what it waits for (see `cells`).
FREEING = 1.0


def write_request(task: Task | None, parts: Mapping[str, Any] | None = None) -> int:
    """A task request in a memory file; raises `PayloadError` for what of its `parts` can't travel."""
    __tracebackhide__ = True  # IPython shows the person's own frames alone
    sources = current_sources() if parts is not None else CellSources({}, {})
    names: dict[str, Any] = {}
    main_names = list(vars(sys.modules["__main__"]).items())
    try:
        known = frozenset(name for name, value in main_names if is_of_main(value))
        entries = dump(TaskRequest(task, known, sources.lines, sources.numbers, names), names)
    except Exception as error:  # noqa: BLE001 - a pickler calls anybody's code, which may raise anything
        raise explain(parts or {}, error, sources) from None
    descriptor = memory_file("accelerate_nb_request")
    try:
        write_entries(descriptor, entries)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_reply(descriptor: int, rank: int) -> TaskReply:
    """The reply of a rank in its memory file, which is closed; a `Failure` in it where it can't be unpickled."""
    try:
        reply: TaskReply = load(map_entries(descriptor))
    except Exception as error:  # noqa: BLE001 - unpickling runs anybody's code
        return TaskReply(0.0, failure=unpickling_failure(rank, "reply", error), error=error)
    finally:
        os.close(descriptor)
    return reply


@dataclass(slots=True)
class PendingCell:
    """
    A cell that runs: the ranks that have not replied, its timers, the reason why it was ended.

    `uses_groups`: it may use the ranks' process groups.
    """

    cell: CellRun
    waiting: set[int]
    uses_groups: bool
    timers: list[threading.Timer] = field(default_factory=list)
    failed: bool = False
    interrupted: bool = False
    timeout: float | None = None
    stacks: str | None = None

    def after(self, seconds: float, do: Callable[[PendingCell], None]) -> None:
        """Have something done after a while, unless the cell is done before."""
        timer = threading.Timer(seconds, do, (self,))
        timer.daemon = True
        timer.name = "accelerate_nb cell"
        self.timers.append(timer)
        timer.start()

    def close(self) -> None:
        """Forget what was to be done later."""
        for timer in self.timers:
            timer.cancel()


class TaskDispatcher:
    """
    Sends tasks to a session's ranks, and ends each cell when all of its ranks have replied.

    `on_stuck` is called with the error where a rank does not follow an interrupt. `names` are the variables of each rank after
    its last task, `pids` the process numbers of the ranks.
    """

    def __init__(
        self,
        conductor: Conductor,
        config: RunConfig,
        on_stuck: Callable[[HangError], None],
        ranks: Sequence[int],
    ) -> None:
        self.config = config
        self.lock = threading.RLock()
        self.names: dict[int, tuple[str, ...]] = {}
        self.pids: dict[int, int] = {}
        self.conductor, self._on_stuck = conductor, on_stuck
        self.ranks = tuple(ranks)
        self._open: dict[int, PendingCell] = {}
        self._numbers = itertools.count(1)
        self._counts: dict[int, Mapping[str, int]] = {}
        self._broken = False

    @property
    def busy(self) -> tuple[CellRun, ...]:
        """The cells that run now."""
        with self.lock:
            return tuple(pending_cell.cell for pending_cell in self._open.values())

    def begin(
        self,
        task: Task,
        ranks: Sequence[int] | None,
        name: str,
        timeout: float | None,
        parts: Mapping[str, Any] | None = None,
    ) -> CellRun:
        """
        Send a task to some ranks, or to all; `timeout` in seconds, or that of the configuration.

        Raises `PayloadError`, which names what of `parts` can't travel, `ConfigurationError` where there is no such rank, and
        `LaunchError` where one still runs something else.
        """
        __tracebackhide__ = True  # IPython shows the person's own frames alone
        wanted = self._checked(ranks)
        request = write_request(task, parts)
        try:
            with self.lock:
                self._check_free(wanted, name)
                cell = CellRun(self, name, wanted, next(self._numbers))
                self._open[cell.number] = pending_cell = self._pending(cell, task)
                self.conductor.restart_watchdog(self.config.launching.hang_warning_after)
                self._send(pending_cell, request)
        finally:
            os.close(request)
        limit = self.config.launching.timeout if timeout is None else timeout
        if limit is not None and not isinstance(task, (PushNames, PullNames)):
            pending_cell.timeout = limit
            pending_cell.after(limit, self._be_late)
        return cell

    def interrupt(self, cell: CellRun) -> None:
        """Interrupt a cell on every rank that has not ended it."""
        with self.lock:
            pending_cell = self._open.get(cell.number)
            if pending_cell is None:
                return
            pending_cell.interrupted = True
            for rank in pending_cell.waiting:
                self.conductor.send(rank, InterruptTask(cell.number, self._others(rank)))
            pending_cell.after(FREEING + self.config.launching.stop_grace_period, self._give_up)

    def set_knob(self, name: str, value: float) -> None:
        """Change a knob of the training that runs; raises `StateError` where no cell does."""
        if not self.busy:
            raise StateError(f"Knob {name!r} was to be changed, and no cell runs. Knobs change while a cell trains.")
        self.conductor.set_knob(name, value)

    def profile(self, steps: int, ranks: Iterable[int] | None) -> None:
        """Have ranks, by default all, profile their next optimizer steps; raises `StateError` where no cell runs."""
        if not self.busy:
            raise StateError("A profile was requested, and no cell runs. Profile ranks while a cell trains.")
        self.conductor.profile(steps, ranks)

    def stacks(self) -> str:
        """The stack of every rank, with the lines of the cells."""
        if not self.busy:
            return "" if self.conductor.done else "Every rank waits for a cell."
        return self.conductor.stacks()

    def returned(self) -> set[int]:
        """The ranks that have returned from a cell which others still run."""
        with self.lock:
            return {
                rank
                for pending_cell in self._open.values()
                for rank in pending_cell.cell.ranks
                if rank not in pending_cell.waiting
            }

    def end_deadlock(self, stacks: str) -> bool:
        """In the run's thread: end the cells from which ranks have returned, for which others wait; whether there are any."""
        with self.lock:
            cells = [
                pending_cell
                for pending_cell in self._open.values()
                if len(pending_cell.waiting) < len(pending_cell.cell.ranks)
            ]
            for pending_cell in cells:
                pending_cell.stacks, pending_cell.timeout = stacks, None
                self.interrupt(pending_cell.cell)
            return bool(cells)

    def end(self, error: BaseException | None) -> None:
        """End the cells that still run, since the workers have ended."""
        with self.lock:
            over, self._open = list(self._open.values()), {}
        for pending_cell in over:
            pending_cell.close()
            text = f"{pending_cell.cell.name} was still running when the session was ended. Start another session."
            pending_cell.cell.finish(error or LaunchError(text))

    def _send(self, pending_cell: PendingCell, request: int) -> None:
        """Send a task to the cell's ranks; where process groups have to be rebuilt first, all ranks take part."""
        renewal = self._renewal(pending_cell)
        for rank in self.ranks:
            takes_part = rank in pending_cell.cell.ranks
            if not takes_part and renewal is None:
                continue
            message = BeginTask(pending_cell.cell.number, renewal, self._others(rank))
            if takes_part:
                pending_cell.waiting.add(rank)
                self.conductor.send(rank, message, (request,))
            else:
                self._send_nothing_but(message, rank)

    def _renewal(self, pending_cell: PendingCell) -> str | None:
        """The name under which process groups are rebuilt before a cell, where they have to be."""
        if not (pending_cell.uses_groups and self._broken and len(self.ranks) > 1):
            return None
        self._check_free(self.ranks, pending_cell.cell.name)
        self._broken = False
        return f"{pending_cell.cell.number}"

    def _send_nothing_but(self, message: BeginTask, rank: int) -> None:
        """Have a rank take part in rebuilding the groups, and do nothing else."""
        nothing = write_request(None)
        self.conductor.send(rank, message, (nothing,))
        os.close(nothing)

    def _pending(self, cell: CellRun, task: Task) -> PendingCell:
        return PendingCell(cell, set(), isinstance(task, (RunCell, CallFunction)))

    def _others(self, rank: int) -> tuple[int, ...]:
        return tuple(pid for other, pid in self.pids.items() if other != rank)

    def _checked(self, ranks: Sequence[int] | None) -> tuple[int, ...]:
        __tracebackhide__ = True  # IPython shows the person's own frames alone
        wanted = self.ranks if ranks is None else tuple(sorted(set(ranks)))
        if not wanted or not set(wanted) <= set(self.ranks):
            raise ConfigurationError(
                f"ranks={list(ranks or ())} was requested, but the session's ranks are {named(self.ranks)}. "
                "Name some of these, or none for all."
            )
        return wanted

    def _check_free(self, wanted: Sequence[int], name: str) -> None:
        __tracebackhide__ = True  # IPython shows the person's own frames alone
        for pending_cell in self._open.values():
            both = sorted(set(wanted) & pending_cell.waiting)
            if both:
                raise LaunchError(
                    f"{name} was sent to {of_ranks(both, listed)}, still busy with "
                    f"{pending_cell.cell.name}. Wait for it, or interrupt it."
                )

    def take(self, event: TaskDone) -> None:
        """In the run's thread: take a rank's reply."""
        with self.lock:
            self._take(event)

    def _take(self, event: TaskDone) -> None:
        file = self.conductor.task_reply(event.rank, event.number)
        pending_cell = self._open.get(event.number)
        if pending_cell is None or event.rank not in pending_cell.waiting:
            # of a rank that only took part in rebuilding the groups
            os.close(file)
            return
        pending_cell.waiting.discard(event.rank)
        reply = read_reply(file, event.rank)
        self._counts[event.rank] = reply.groups
        failure = reply.failure
        value = reply.value if reply.value is None or RETURNED not in reply.value else reply.value[RETURNED]
        ok, metadata = failure is None, dict(reply.metadata)
        end = CellResult(
            event.rank, ok, reply.seconds, reply.result, value, failure, reply.error, metadata, reply.left_out
        )
        self.names[event.rank] = reply.names
        if failure is not None and (failure.ended_by_us or failure.lost_connection or reply.in_collective):
            self._broken = True
        is_last = pending_cell.cell.take(end)
        if failure is not None and not pending_cell.failed:
            pending_cell.failed = True
            if not is_last:
                pending_cell.after(SETTLE, self._settle)
        if is_last:
            self._finish(pending_cell)

    def _finish(self, pending_cell: PendingCell) -> None:
        pending_cell.close()
        del self._open[pending_cell.cell.number]
        if not self._open:
            # workers that have nothing to do send nothing
            self.conductor.restart_watchdog(0.0)
        first = self._counts.get(self.ranks[0])
        if pending_cell.failed and first is not None and any(counts != first for counts in self._counts.values()):
            # a collective was begun by some ranks only, and waits for the others
            self._broken = True
        pending_cell.cell.finish(self._error_of(pending_cell))

    def _error_of(self, pending_cell: PendingCell) -> BaseException | None:
        ends = pending_cell.cell.ends
        failures = [end.failure for end in ends if end.failure is not None]
        rank_results = [RankResult(end.rank, value=end.value, failure=end.failure, error=end.error) for end in ends]
        if not failures:
            return None
        if pending_cell.stacks is not None:
            return hang_error(pending_cell.timeout, pending_cell.stacks, rank_results, self.conductor.facts.folder)
        only_ended = all(failure.ended_by_us or failure.lost_connection for failure in failures)
        if pending_cell.cell.was_interrupted and only_ended:
            text = f"{pending_cell.cell.name} was interrupted; the session goes on, with its variables"
            return KeyboardInterrupt(text)
        return worker_error(rank_results, self.conductor.facts.folder)

    # ------------------------------------------------------------------------------------- what happens after a while

    def _settle(self, pending_cell: PendingCell) -> None:
        """A rank has failed, and others go on: they may wait for it for ever."""
        self.interrupt(pending_cell.cell)

    def _be_late(self, pending_cell: PendingCell) -> None:
        pending_cell.stacks = self.conductor.stacks()
        self.interrupt(pending_cell.cell)

    def _give_up(self, pending_cell: PendingCell) -> None:
        """End the session, since a rank did not follow an interrupt."""
        stuck = ", ".join(map(str, sorted(pending_cell.waiting)))
        error = HangError()
        error.message = (
            f"{pending_cell.cell.name} was to be interrupted, and rank {stuck} had not come back after "
            f"{FREEING + self.config.launching.stop_grace_period:g} s. The session was ended; it was here:\n\n"
            f"{pending_cell.stacks or self.conductor.stacks()}\n\nAll output: {shown_path(self.conductor.facts.folder)}"
        )
        error.folder = str(self.conductor.facts.folder)
        with self.lock:
            if pending_cell.cell.done:
                return
            self._on_stuck(error)
