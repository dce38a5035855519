"""The cells of a session: sent to its ranks, timed, followed, and ended with the ranks' replies."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accelerate_nb.config.rank_lists import listed, named, of_ranks
from accelerate_nb.config.run_config import RunConfig
from accelerate_nb.errors import ConfigurationError, HangError, LaunchError, StateError
from accelerate_nb.events.event_types import State, StateChange, TaskDone
from accelerate_nb.events.run_folder import shown_path
from accelerate_nb.failures.rank_result import RankResult
from accelerate_nb.failures.worker_error import hang_error, worker_error
from accelerate_nb.launching.conductor import Conductor
from accelerate_nb.launching.run import LaunchFacts
from accelerate_nb.launching.worker_group import Stop
from accelerate_nb.sources.cells import CellSources, current_sources
from accelerate_nb.transport.memory_file import map_entries, memory_file, write_entries
from accelerate_nb.transport.messages import BeginTask, InterruptTask
from accelerate_nb.transport.outcome import unpickling_failure
from accelerate_nb.transport.serializer import dump, explain, is_of_main, load
from accelerate_nb.transport.session_tasks import RETURNED, CallFunction, RunCell, Task, TaskReply, TaskRequest


@dataclass(frozen=True, slots=True)
class CellResult(RankResult):
    """The result of a cell on one rank: its `value`, or the MIME bundle `result` of its last expression."""

    seconds: float = 0.0
    result: dict[str, Any] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the rank has come to the cell's end."""
        return self.failure is None


# After one rank has failed: how long the others may still come to their own end before they are interrupted; longer where it has only lost
# its connection, since another one has the cause.
SETTLE, SETTLE_WITHOUT_CAUSE = 0.5, 1.0
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


class CellControl:
    """The way to a session's ranks while they run one cell, with the cell's slice of the session's state."""

    # its session keeps what there is to keep
    trouble = None

    def __init__(self, tasks: TaskDispatcher, facts: LaunchFacts, number: int, cursor: int, *, runs_code: bool) -> None:
        self._tasks, self.facts, self.number, self.runs_code = tasks, facts, number, runs_code
        self.over = threading.Event()
        self.main_rank = facts.ranks[0]
        self.rank_results: tuple[CellResult, ...] = ()
        self.error: BaseException | None = None
        self.waiting: set[int] = set()
        self.ended: dict[int, CellResult] = {}
        self.is_interrupted = False
        # what ended it, where its time was over or ranks waited for one that had returned
        self.timeout: float | None = None
        self.stacks_at_end: str | None = None
        self._timers: list[threading.Timer] = []
        # of the whole session
        self.log_file, self.stacks = tasks.conductor.log_file, tasks.stacks
        self.view = tasks.conductor.view.slice(facts.ranks, cursor)
        for rank in self.view.ranks:
            state: State = "running" if rank in facts.ranks else "finished"
            self.view.apply(StateChange(rank, state, facts.started, "" if rank in facts.ranks else "has no part in it"))
        self.view.apply(StateChange(None, "running", facts.started, facts.why))

    @property
    def is_going_on(self) -> bool:
        """Whether it may still end by itself."""
        return not self.over.is_set()

    def start(self) -> None:
        """It was sent to the ranks before."""

    def request_stop(self, how: Stop) -> None:
        """Interrupt the cell on every rank that still runs it, and leave the session; a "kill" ends that."""
        if how == "kill" and not self.over.is_set():
            self._tasks.conductor.request_stop("kill")
        elif not self.over.is_set():
            self.is_interrupted = True
            self._tasks.interrupt(self)

    def set_knob(self, name: str, value: float) -> None:
        """Change a knob of the training that runs, on all ranks after the same optimizer step (`Run.set_knob`)."""
        if self.over.is_set():
            raise StateError(f"Knob {name!r} was to be changed, and no cell runs. Knobs change while a cell trains.")
        self._tasks.conductor.set_knob(name, value)

    def profile(self, steps: int = 10, ranks: Iterable[int] | None = None) -> None:
        """Have ranks of the cell, by default all, profile their next optimizer steps (`Run.profile`)."""
        if self.over.is_set():
            raise StateError("A profile was requested, and no cell runs. Profile ranks while a cell trains.")
        self._tasks.conductor.profile(steps, self.facts.ranks if ranks is None else ranks)

    # ------------------------------------------------------------------------------------------- what the session does

    def after(self, seconds: float, do: Callable[[CellControl], None]) -> None:
        """Have something done after a while, unless the cell is done before."""
        timer = threading.Timer(seconds, do, (self,))
        timer.daemon = True
        timer.name = "accelerate_nb cell"
        self._timers.append(timer)
        timer.start()

    def take(self, rank: int, reply: TaskReply) -> None:
        """Take the reply of a rank."""
        value = reply.value if reply.value is None or RETURNED not in reply.value else reply.value[RETURNED]
        self.ended[rank] = CellResult(
            rank,
            value,
            reply.failure,
            reply.error,
            left_out=reply.left_out,
            seconds=reply.seconds,
            result=reply.result,
            metadata=dict(reply.metadata),
        )
        self.waiting.discard(rank)
        state: State = "finished"
        if reply.failure is not None:
            self.view.apply(reply.failure)
            state = "stopped" if reply.failure.ended_by_us else "failed"
        self.view.apply(StateChange(rank, state, time.time()))

    def finish(self, error: BaseException | None) -> None:
        """End the cell with `error`, or with success."""
        for timer in self._timers:
            timer.cancel()
        self.error, self.rank_results = error, tuple(self.ended[rank] for rank in sorted(self.ended))
        if isinstance(error, HangError) and error.hang is not None:
            self.view.apply(error.hang)
        for rank in set(self.facts.ranks) - self.ended.keys():
            self.view.apply(StateChange(rank, "failed", time.time()))
        state: State = "finished" if error is None else "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        self.view.apply(StateChange(None, state, time.time()))
        self.over.set()


class TaskDispatcher:
    """Sends tasks to a session's ranks, and ends each cell when all of its ranks have replied."""

    def __init__(self, conductor: Conductor, config: RunConfig, on_stuck: Callable[[HangError], None]) -> None:
        self.config = config
        self.lock = threading.RLock()
        self.names: dict[int, tuple[str, ...]] = {}
        self.pids: dict[int, int] = {}
        self.conductor, self._on_stuck = conductor, on_stuck
        self.ranks = conductor.view.ranks
        self._open: dict[int, CellControl] = {}
        self._numbers = itertools.count(1)
        # where the output of the last cell ended: a cell begins with what was written between the two
        self._cursor = 0
        self._counts: dict[int, Mapping[str, int]] = {}
        self._broken = False

    @property
    def busy(self) -> tuple[CellControl, ...]:
        """The cells that run now."""
        with self.lock:
            return tuple(self._open.values())

    def begin(
        self,
        task: Task,
        ranks: Sequence[int] | None,
        name: str,
        timeout: float | None = None,
        parts: Mapping[str, Any] | None = None,
        *,
        outlives_wait: bool = False,
    ) -> CellControl:
        """Send a task to some ranks, or to all; raises `PayloadError`, `ConfigurationError` or `LaunchError`."""
        __tracebackhide__ = True  # IPython shows the person's own frames alone
        wanted = self.ranks if ranks is None else tuple(sorted(set(ranks)))
        if not wanted or not set(wanted) <= set(self.ranks):
            raise ConfigurationError(
                f"ranks={list(ranks or ())} was requested, but the session's ranks are {named(self.ranks)}. "
                "Name some of these, or none for all."
            )
        runs_code = isinstance(task, (RunCell, CallFunction))
        facts = LaunchFacts(
            name=name,
            why=self.conductor.facts.why,
            folder=self.conductor.facts.folder,
            started=time.time(),
            results="all",
            stop_grace_period=self.config.launching.stop_grace_period,
            ranks=wanted,
            is_cell=True,
            outlives_wait=outlives_wait,
        )
        request = write_request(task, parts)
        try:
            with self.lock:
                rebuilds_groups = runs_code and self._broken and len(self.ranks) > 1
                # where process groups have to be rebuilt first, all ranks take part
                taking_part = set(self.ranks if rebuilds_groups else wanted)
                for other in self._open.values():
                    if both := sorted(taking_part & other.waiting):
                        raise LaunchError(
                            f"{name} was sent to {of_ranks(both, listed)}, still busy with {other.facts.name}. Wait for it, or interrupt it."
                        )
                cell = CellControl(self, facts, next(self._numbers), self._cursor, runs_code=runs_code)
                self._open[cell.number] = cell
                self.conductor.restart_watchdog(self.config.launching.hang_warning_after)
                self._send(cell, request, rebuilds_groups=rebuilds_groups)
        finally:
            os.close(request)
        limit = self.config.launching.timeout if timeout is None else timeout
        if limit is not None and runs_code:
            cell.timeout = limit
            cell.after(limit, self._be_late)
        return cell

    def _send(self, cell: CellControl, request: int, *, rebuilds_groups: bool) -> None:
        """Send a task to the cell's ranks; the others are to take part in rebuilding process groups, and do nothing else."""
        self._broken = self._broken and not rebuilds_groups
        generation = f"{cell.number}" if rebuilds_groups else None
        for rank in self.ranks if rebuilds_groups else cell.facts.ranks:
            message = BeginTask(cell.number, generation, self._others(rank))
            if rank in cell.facts.ranks:
                cell.waiting.add(rank)
                self.conductor.send(rank, message, (request,))
            else:
                nothing = write_request(None)
                self.conductor.send(rank, message, (nothing,))
                os.close(nothing)

    def _others(self, rank: int) -> tuple[int, ...]:
        return tuple(pid for other, pid in self.pids.items() if other != rank)

    def interrupt(self, cell: CellControl) -> None:
        """Interrupt a cell on every rank that has not ended it."""
        with self.lock:
            if cell.number not in self._open:
                return
            for rank in cell.waiting:
                self.conductor.send(rank, InterruptTask(cell.number, self._others(rank)))
            cell.after(FREEING + self.config.launching.stop_grace_period, self._give_up)

    def stacks(self) -> str:
        """The stack of every rank, with the lines of the cells."""
        if not self.busy:
            return "" if self.conductor.over.is_set() else "Every rank waits for a cell."
        return self.conductor.stacks()

    def returned(self) -> set[int]:
        """The ranks that have returned from a cell which others still run."""
        with self.lock:
            return {rank for cell in self._open.values() for rank in cell.ended}

    def end_deadlock(self, stacks: str) -> bool:
        """In the run's thread: end the cells from which ranks have returned, for which others wait; whether there are any."""
        with self.lock:
            cells = [cell for cell in self._open.values() if cell.ended]
            for cell in cells:
                cell.stacks_at_end, cell.timeout = stacks, None
                self.interrupt(cell)
            return bool(cells)

    def end(self, error: BaseException | None) -> None:
        """End the cells that still run, since the workers have ended."""
        with self.lock:
            over, self._open = list(self._open.values()), {}
        for cell in over:
            text = f"{cell.facts.name} was still running when the session was ended. Start another session."
            cell.finish(error or LaunchError(text))

    def take(self, event: TaskDone) -> None:
        """In the run's thread: take a rank's reply."""
        with self.lock:
            file = self.conductor.task_reply(event.rank, event.number)
            cell = self._open.get(event.number)
            if cell is None or event.rank not in cell.waiting:
                # of a rank that only took part in rebuilding the groups
                os.close(file)
                return
            reply = read_reply(file, event.rank)
            self.names[event.rank], self._counts[event.rank] = reply.names, reply.groups
            failure = reply.failure
            if failure is not None and (failure.ended_by_us or failure.lost_connection or reply.in_collective):
                self._broken = True
            cell.take(event.rank, reply)
            if not cell.waiting:
                self._finish(cell)
            elif failure is not None and sum(not result.ok for result in cell.ended.values()) == 1:
                # the others may wait for it for ever
                cell.after(SETTLE_WITHOUT_CAUSE if failure.lost_connection else SETTLE, self.interrupt)

    def _finish(self, cell: CellControl) -> None:
        del self._open[cell.number]
        if not self._open:
            # workers that have nothing to do send nothing
            self.conductor.restart_watchdog(0.0)
        error = self._error_of(cell)
        first = self._counts.get(self.ranks[0])
        if error is not None and first is not None and any(counts != first for counts in self._counts.values()):
            # a collective was begun by some ranks only, and waits for the others
            self._broken = True
        cursor = self.conductor.view.end_slice(cell.view)
        if cell.runs_code:
            self._cursor = cursor
        cell.finish(error)

    def _error_of(self, cell: CellControl) -> BaseException | None:
        rank_results = [cell.ended[rank] for rank in cell.facts.ranks]
        failures = [result.failure for result in rank_results if result.failure is not None]
        if not failures:
            return None
        if cell.stacks_at_end is not None:
            return hang_error(cell.timeout, cell.stacks_at_end, rank_results, self.conductor.facts.folder)
        if cell.is_interrupted and all(failure.ended_by_us or failure.lost_connection for failure in failures):
            return KeyboardInterrupt(f"{cell.facts.name} was interrupted; the session goes on, with its variables")
        return worker_error(rank_results, self.conductor.facts.folder)

    # ------------------------------------------------------------------------------------- what happens after a while

    def _be_late(self, cell: CellControl) -> None:
        cell.stacks_at_end = self.conductor.stacks()
        self.interrupt(cell)

    def _give_up(self, cell: CellControl) -> None:
        """End the session, since a rank did not follow an interrupt."""
        stuck = ", ".join(map(str, sorted(cell.waiting)))
        error = HangError()
        error.message = (
            f"{cell.facts.name} was to be interrupted, and rank {stuck} had not come back after "
            f"{FREEING + self.config.launching.stop_grace_period:g} s. The session was ended; it was here:\n\n"
            f"{cell.stacks_at_end or self.conductor.stacks()}\n\nAll output: {shown_path(self.conductor.facts.folder)}"
        )
        error.folder = str(self.conductor.facts.folder)
        with self.lock:
            if not cell.over.is_set():
                self._on_stuck(error)
