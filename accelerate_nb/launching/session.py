"""A session: a run whose workers stay, and keep their variables from one cell to the next; and the cells that they run."""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from accelerate_nb.config.environment import already_launched
from accelerate_nb.config.rank_lists import listed, named, of_ranks
from accelerate_nb.config.run_config import RunConfig
from accelerate_nb.errors import AccelerateNbError, ConfigurationError, HangError, LaunchError, NotYetError, StateError
from accelerate_nb.events.event_types import OVER, Event, State, StateChange, TaskDone
from accelerate_nb.events.run_folder import shown_path
from accelerate_nb.failures.hang_report import StackSnapshot, snapshot_text
from accelerate_nb.failures.rank_result import RankResult
from accelerate_nb.failures.worker_error import hang_error, worker_error
from accelerate_nb.launching.launcher import prepare
from accelerate_nb.launching.node_agent.node_network import BETWEEN_INTERRUPT_CHECKS
from accelerate_nb.launching.run import FrontEnd, LaunchFacts, Run
from accelerate_nb.launching.worker_group import Stop
from accelerate_nb.sources.cells import CellSources, current_sources
from accelerate_nb.transport import session_tasks
from accelerate_nb.transport.memory_file import map_entries, memory_file, write_entries
from accelerate_nb.transport.messages import BeginTask, CloseSession, InterruptTask
from accelerate_nb.transport.outcome import unpickling_failure
from accelerate_nb.transport.payload import check_function
from accelerate_nb.transport.serializer import dump, explain, is_of_main, load
from accelerate_nb.worker.session import task_loop


@dataclass(frozen=True, slots=True)
class CellResult(RankResult):
    """The result of a cell on one rank: its `value`, or the MIME bundle `result` of its last expression."""

    seconds: float = 0.0
    result: dict[str, Any] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.failure is None


# After one rank has failed: how long the others may still come to their own end before they are interrupted; longer where it has only lost
# its connection, since another one has the cause.
SETTLE, SETTLE_WITHOUT_CAUSE = 0.5, 1.0
# What an interrupted rank gets, beside `stop_grace_period`, to be freed from what it waits for.
FREEING = 1.0


def write_request(task: session_tasks.Task | None, parts: Mapping[str, Any] | None = None) -> int:
    """A task request in a memory file; raises `PayloadError` for what of its `parts` can't travel."""
    __tracebackhide__ = True  # IPython shows the person's own frames alone
    sources = current_sources() if parts is not None else CellSources({}, {})
    names: dict[str, Any] = {}
    main_names = list(vars(sys.modules["__main__"]).items())
    try:
        known = frozenset(name for name, value in main_names if is_of_main(value))
        entries = dump(session_tasks.TaskRequest(task, known, sources.lines, sources.numbers, names), names)
    except Exception as error:  # noqa: BLE001 - a pickler calls anybody's code, which may raise anything
        raise explain(parts or {}, error, sources) from None
    descriptor = memory_file("accelerate_nb_request")
    try:
        write_entries(descriptor, entries)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_reply(descriptor: int, rank: int) -> session_tasks.TaskReply:
    """The reply of a rank in its memory file, which is closed; a `Failure` in it where it can't be unpickled."""
    try:
        reply: session_tasks.TaskReply = load(map_entries(descriptor))
    except Exception as error:  # noqa: BLE001 - unpickling runs anybody's code
        return session_tasks.TaskReply(0.0, failure=unpickling_failure(rank, "reply", error), error=error)
    finally:
        os.close(descriptor)
    return reply


class CellControl:
    """The way to a session's ranks while they run one cell, with the cell's slice of the session's state."""

    # its session keeps what there is to keep
    trouble = None

    def __init__(self, session: Session, facts: LaunchFacts, number: int, cursor: int, *, runs_code: bool) -> None:
        self._session, self.facts, self.number, self.runs_code = session, facts, number, runs_code
        self.over = threading.Event()
        self.main_rank = facts.ranks[0]
        self.rank_results: tuple[CellResult, ...] = ()
        self.error: BaseException | None = None
        # the ranks that have not replied, and the results of the others
        self.waiting: set[int] = set()
        self.ended: dict[int, CellResult] = {}
        self.is_interrupted = False
        # what ended it, where its time was over or ranks waited for one that had returned
        self.timeout: float | None = None
        self.stacks_at_end: str | None = None
        self._timers: list[threading.Timer] = []
        # of the whole session
        self.log_file, self.stacks = session.conductor.log_file, session.stacks
        self.view = session.conductor.view.slice(facts.ranks, cursor)
        for rank in self.view.ranks:
            state: State = "running" if rank in facts.ranks else "finished"
            self.view.apply(StateChange(rank, state, facts.started, "" if rank in facts.ranks else "has no part in it"))
        self.view.apply(StateChange(None, "running", facts.started, facts.why))

    @property
    def is_going_on(self) -> bool:
        return not self.over.is_set()

    def start(self) -> None:
        """It was sent to the ranks before."""

    def request_stop(self, how: Stop) -> None:
        """Interrupt the cell on every rank that still runs it, and leave the session; a "kill" ends that."""
        if how == "kill" and not self.over.is_set():
            self._session.conductor.request_stop("kill")
        elif not self.over.is_set():
            self.is_interrupted = True
            self._session.interrupt(self)

    def set_knob(self, name: str, value: float) -> None:
        if self.over.is_set():
            raise StateError(f"Knob {name!r} was to be changed, and no cell runs. Knobs change while a cell trains.")
        self._session.conductor.set_knob(name, value)

    def profile(self, steps: int = 10, ranks: Iterable[int] | None = None) -> None:
        if self.over.is_set():
            raise StateError("A profile was requested, and no cell runs. Profile ranks while a cell trains.")
        self._session.conductor.profile(steps, self.facts.ranks if ranks is None else ranks)

    def after(self, seconds: float, do: Callable[[CellControl], None]) -> None:
        """Have something done after a while, unless the cell is done before."""
        timer = threading.Timer(seconds, do, (self,))
        timer.daemon = True
        timer.name = "accelerate_nb cell"
        self._timers.append(timer)
        timer.start()

    def take(self, rank: int, reply: session_tasks.TaskReply) -> None:
        value = reply.value and reply.value.get(session_tasks.RETURNED, reply.value)
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


class Session:
    """Workers that stay, and run one cell after the other, each with `accelerator`, `rank`, `device` ..."""

    @classmethod
    def start(cls, config: RunConfig) -> Session:
        """Start the workers, and return when they are ready; raises `LaunchError` or `WorkerError`."""
        __tracebackhide__ = True  # IPython shows the person's own frames alone
        if already_launched(os.environ):
            raise LaunchError(
                f"A session was requested inside rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, which a launcher "
                "started already. Use %%accelerate in a notebook of its own; a script has no cells to run one after the other."
            )
        if config.launching.engine == "inline":
            raise LaunchError(
                "engine='inline' was requested, but a session's workers are processes of their own. Leave engine out."
            )
        if config.launching.min_nodes is not None:
            raise NotYetError(
                f"min_nodes={config.launching.min_nodes} was requested for a session, which does not start again with fewer nodes after a loss "
                "yet. Pass one number of nodes, or launch a function with max_restarts."
            )
        if config.launching.is_on_each_node:
            raise LaunchError(
                f"A session was requested with num_nodes={config.launching.num_nodes}, launched on each of several machines, whose cells one "
                "notebook can't send to all. Name the machines, which one notebook reaches: hosts=['a', 'b'], engine='slurm', 'ray' or "
                "'join'. Or launch a function on each machine."
            )
        try:
            session = cls(config)
        except AccelerateNbError as error:
            # it explains itself, without the calls of this package that led to it
            raise error.with_traceback(None) from None
        session._wait_until_ready()
        return session

    def __init__(self, config: RunConfig) -> None:
        # what the session was started with, and `adjust` has changed
        self.config = config
        self._ready: set[int] = set()
        self._begun, self._gone = threading.Event(), threading.Event()
        self._cells = itertools.count(1)
        self._closing = False
        # the reason why it ended, where the end was not requested: a `WorkerError` with a worker's last words, a `LaunchError`
        self.error: BaseException | None = None
        # a cell has its own timeout and its own idle watchdog
        launching_config = replace(
            config.launching, timeout=None, max_restarts=0, hang_warning_after=0.0, results="main"
        )
        worker_config = replace(config, launching=launching_config)
        self.conductor = prepare(task_loop.session, (), worker_config, self._on_event)
        # everything that has happened so far; all ranks; the folder of their output, the metrics and the events
        self.view, facts = self.conductor.view, self.conductor.facts
        self.ranks, self.size, self.folder = self.view.ranks, len(self.view.ranks), facts.folder
        # the number of workers, what placed them, and why; the start in seconds since 1970
        self.why, self.started = facts.why, facts.started
        self._lock = threading.RLock()
        self._open: dict[int, CellControl] = {}
        self._numbers = itertools.count(1)
        self._pids: dict[int, int] = {}
        # of each rank after its last task: its variables, and how many collectives of each group it has made
        self._names: dict[int, tuple[str, ...]] = {}
        self._counts: dict[int, Mapping[str, int]] = {}
        # where the output of the last cell ended: a cell begins with what was written between the two
        self._cursor = 0
        self._broken = False
        self.conductor.run_context.returned_from_task = self._returned
        self.conductor.run_context.end_task = self._end_deadlock

    def _wait_until_ready(self) -> None:
        __tracebackhide__ = True  # IPython shows the person's own frames alone
        self.conductor.start()
        try:
            while not self._begun.wait(BETWEEN_INTERRUPT_CHECKS):
                pass
        except BaseException:
            self.request_stop("kill")
            self._gone.wait(self.config.launching.stop_grace_period + 5)
            raise
        if self._gone.is_set():
            raise self.conductor.error or LaunchError(
                "The session's workers ended before they were ready. Start it again."
            )
        known = (glance for glance in self.view.glances() if glance.detail.isdigit() and glance.rank in self.ranks)
        self._pids = {glance.rank: int(glance.detail) for glance in known}
        atexit.register(self.close)

    @property
    def name(self) -> str:
        return self.conductor.facts.name

    @property
    def alive(self) -> bool:
        return not self._closing and not self._gone.is_set()

    @property
    def done(self) -> bool:
        return self._gone.is_set()

    @property
    def names(self) -> tuple[str, ...]:
        """The variables that some rank had after its last task."""
        return tuple(sorted(set().union(*self._names.values())))

    @property
    def busy(self) -> tuple[LaunchFacts, ...]:
        with self._lock:
            return tuple(cell.facts for cell in self._open.values())

    def run(
        self,
        source: str,
        *,
        ranks: Sequence[int] | None = None,
        name: str | None = None,
        number: int | None = None,
        filename: str | None = None,
        first_line: int = 1,
        timeout: float | None = None,
        front_end: FrontEnd | None = None,
        outlives_wait: bool = False,
    ) -> Run:
        """Run the text of a cell on all ranks, or on some; returns at once; raises `PayloadError`, `ConfigurationError` or `LaunchError`."""
        # tracebacks name its lines as `Cell In[number], line N`, where line `first_line` is the first one (2 below a
        # magic), and keep them under `filename`; by default the session counts
        __tracebackhide__ = True  # IPython shows the person's own frames alone
        count = next(self._cells)
        number = count if number is None else number
        text = "\n" * (first_line - 1) + source
        filename = filename or f"<cell {number} of session {self.folder.name}, {count}>"
        sources = CellSources({filename: [line + "\n" for line in text.split("\n")]}, {filename: number})
        sources.install()
        # stacks may name the cell, too
        context = self.conductor.run_context
        context.sources = CellSources(
            {**context.sources.lines, **sources.lines}, {**context.sources.numbers, **sources.numbers}
        )
        cell = session_tasks.RunCell(text, filename, number)
        name = name or f"Cell In[{number}]"
        control = self._begin(cell, ranks, name, timeout, outlives_wait=outlives_wait)
        return Run(control, front_end or FrontEnd())

    def call(
        self,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        ranks: Sequence[int] | None = None,
        timeout: float | None = None,
        front_end: FrontEnd | None = None,
    ) -> Run:
        """Call a function of the notebook in the workers; returns at once, like `run`."""
        __tracebackhide__ = True  # IPython shows the person's own frames alone
        check_function(function)
        invoke = session_tasks.CallFunction(function, tuple(args), dict(kwargs or {}))
        name = str(getattr(function, "__name__", type(function).__name__))
        parts = {name: function, **{f"args[{index}]": value for index, value in enumerate(args)}, **invoke.kwargs}
        return Run(self._begin(invoke, ranks, name, timeout, parts), front_end or FrontEnd())

    def push(self, values: Mapping[str, Any], *, ranks: Sequence[int] | None = None) -> None:
        """Give variables of the workers these values, one copy for all of them until they write to it."""
        __tracebackhide__ = True  # IPython shows the person's own frames alone
        Run(self._begin(session_tasks.PushNames(dict(values)), ranks, "push", parts=values), FrontEnd()).wait()

    def pull(self, names: Sequence[str], *, ranks: Sequence[int] = ()) -> dict[int, dict[str, Any]]:
        """Variables of some ranks, or of the first, by rank and name; tensors come to the CPU."""
        __tracebackhide__ = True  # IPython shows the person's own frames alone
        control = self._begin(session_tasks.PullNames(tuple(names)), ranks or self.ranks[:1], "pull")
        return {result.rank: result.value for result in Run(control, FrontEnd()).wait()}

    def stacks(self) -> str:
        """The stack of every rank, with the lines of the cells; takes up to some seconds where something runs."""
        if not self.busy:
            return "" if self.conductor.over.is_set() else "Every rank waits for a cell."
        return self.conductor.stacks()

    def adjust(self, **launching: Any) -> None:
        """Give settings of the launching another value from now on: `stop_grace_period`, `name`, `tags` ..."""
        self.config = replace(self.config, launching=replace(self.config.launching, **launching))
        if not launching.keys().isdisjoint({"name", "tags"}):
            self.conductor.rename(self.config.launching.name, self.config.launching.tags)

    def request_stop(self, how: Stop) -> None:
        self.conductor.request_stop(how)

    def close(self) -> None:
        """End the workers, cleanly where they can, on all machines: cells that run are interrupted; returns when all have ended."""
        self._closing = True
        atexit.unregister(self.close)
        with self._lock:
            for cell in self._open.values():
                self.interrupt(cell)
        for rank in self.ranks:
            self.conductor.send(rank, CloseSession())
        if not self._gone.wait(self.config.launching.stop_grace_period + FREEING):
            self.conductor.request_stop("kill")
        # a next session may need its port
        self.conductor.over.wait(5)

    def _on_event(self, event: Event) -> None:
        """In the run's thread: a rank is ready, or has replied; or the run is over."""
        if isinstance(event, TaskDone) and event.rank in self.ranks:
            if event.number:
                self._take(event)
                return
            self._ready.add(event.rank)
            if len(self._ready) == len(self.ranks):
                self._begun.set()
        elif isinstance(event, StateChange) and event.rank is None and event.state in OVER:
            with self._lock:
                if self.error is None and not self._closing:
                    self.error = self.conductor.error
                self._gone.set()
                self._begun.set()
                cells, self._open = list(self._open.values()), {}
            atexit.unregister(self.close)
            for cell in cells:
                text = f"{cell.facts.name} was still running when the session was ended. Start another session."
                cell.finish(self.error or LaunchError(text))

    def _begin(
        self,
        task: session_tasks.Task,
        ranks: Sequence[int] | None,
        name: str,
        timeout: float | None = None,
        parts: Mapping[str, Any] | None = None,
        *,
        outlives_wait: bool = False,
    ) -> CellControl:
        """Send a task to some ranks, or to all; raises `PayloadError`, `ConfigurationError` or `LaunchError`."""
        __tracebackhide__ = True  # IPython shows the person's own frames alone
        self._check_alive()
        wanted = self.ranks if ranks is None else tuple(sorted(set(ranks)))
        if not wanted or not set(wanted) <= set(self.ranks):
            raise ConfigurationError(
                f"ranks={list(ranks or ())} was requested, but the session's ranks are {named(self.ranks)}. "
                "Name some of these, or none for all."
            )
        runs_code = isinstance(task, (session_tasks.RunCell, session_tasks.CallFunction))
        facts = LaunchFacts(
            name=name,
            why=self.why,
            folder=self.folder,
            started=time.time(),
            results="all",
            stop_grace_period=self.config.launching.stop_grace_period,
            ranks=wanted,
            is_cell=True,
            outlives_wait=outlives_wait,
        )
        request = write_request(task, parts)
        try:
            with self._lock:
                # it may have ended while the task was pickled: nothing would end the cell any more
                self._check_alive()
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

    def _check_alive(self) -> None:
        __tracebackhide__ = True  # IPython shows the person's own frames alone
        if not self.alive:
            why = f": {self.error}" if self.error is not None else ""
            raise LaunchError(f"A task was sent to a session that has ended{why}. Start another session.")

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
        return tuple(pid for other, pid in self._pids.items() if other != rank)

    def interrupt(self, cell: CellControl) -> None:
        """Interrupt a cell on every rank that has not ended it."""
        with self._lock:
            if cell.number not in self._open:
                return
            for rank in cell.waiting:
                self.conductor.send(rank, InterruptTask(cell.number, self._others(rank)))
            cell.after(FREEING + self.config.launching.stop_grace_period, self._give_up)

    def _returned(self) -> set[int]:
        """The ranks that have returned from a cell which others still run."""
        with self._lock:
            return {rank for cell in self._open.values() for rank in cell.ended}

    def _end_deadlock(self, snapshot: StackSnapshot) -> bool:
        """In the run's thread: end the cells from which ranks have returned, for which others wait; whether there are any."""
        stacks = snapshot_text(snapshot, self.conductor.run_context.sources)
        with self._lock:
            cells = [cell for cell in self._open.values() if cell.ended]
            for cell in cells:
                cell.stacks_at_end, cell.timeout = stacks, None
                self.interrupt(cell)
            return bool(cells)

    def _take(self, event: TaskDone) -> None:
        with self._lock:
            file = self.conductor.task_reply(event.rank, event.number)
            cell = self._open.get(event.number)
            if cell is None or event.rank not in cell.waiting:
                # of a rank that only took part in rebuilding the groups
                os.close(file)
                return
            reply = read_reply(file, event.rank)
            self._names[event.rank], self._counts[event.rank] = reply.names, reply.groups
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
            return hang_error(cell.timeout, cell.stacks_at_end, rank_results, self.folder)
        if cell.is_interrupted and all(failure.ended_by_us or failure.lost_connection for failure in failures):
            return KeyboardInterrupt(f"{cell.facts.name} was interrupted; the session goes on, with its variables")
        return worker_error(rank_results, self.folder)

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
            f"{cell.stacks_at_end or self.conductor.stacks()}\n\nAll output: {shown_path(self.folder)}"
        )
        error.folder = str(self.folder)
        with self._lock:
            if not cell.over.is_set():
                self.error = error
                self.request_stop("kill")
