"""A session: a run whose workers stay, and keep their variables from one cell to the next."""

from __future__ import annotations

import atexit
import itertools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from accelerate_nb.config.environment import already_launched
from accelerate_nb.config.run_config import RunConfig
from accelerate_nb.errors import AccelerateNbError, HangError, LaunchError, NotYetError
from accelerate_nb.events.event_types import OVER, Event, StateChange, TaskDone
from accelerate_nb.launching.conductor import Conductor
from accelerate_nb.launching.launcher import prepare
from accelerate_nb.launching.run import FrontEnd, LaunchFacts, Run
from accelerate_nb.launching.session.cell_run import FREEING, TaskDispatcher
from accelerate_nb.launching.worker_group import Stop
from accelerate_nb.sources.cells import CellSources
from accelerate_nb.transport.messages import CloseSession
from accelerate_nb.transport.payload import check_function
from accelerate_nb.transport.session_tasks import CallFunction, PullNames, PushNames, RunCell
from accelerate_nb.worker.session import task_loop


class Session:
    """Workers that stay, and run one cell after the other, each with `accelerator`, `rank`, `device` ..."""

    @classmethod
    def start(cls, config: RunConfig) -> Session:
        """Start the workers, and return when they are ready; raises `LaunchError` or `WorkerError`."""
        __tracebackhide__ = True  # IPython shows the person's own frames alone
        check_not_launched()
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
        session._begin_run()
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
        self._conductor: Conductor = prepare(
            task_loop.session, (), replace(config, launching=launching_config), self._on_event
        )
        # everything that has happened so far; all ranks; the folder of their output, the metrics and the events
        self.view, facts = self._conductor.view, self._conductor.facts
        self.ranks, self.size, self.folder = self.view.ranks, len(self.view.ranks), facts.folder
        # the number of workers, what placed them, and why; the start in seconds since 1970
        self.why, self.started = facts.why, facts.started
        self._tasks = TaskDispatcher(self._conductor, config, self._end_stuck)
        self._conductor.serve_tasks(self._tasks.returned, self._tasks.end_deadlock)

    def _begin_run(self) -> None:
        __tracebackhide__ = True  # IPython shows the person's own frames alone
        self._conductor.start()
        try:
            self._begun.wait()
        except BaseException:
            self.request_stop("kill")
            self._gone.wait(self.config.launching.stop_grace_period + 5)
            raise
        if self._gone.is_set():
            raise self._conductor.error or LaunchError(
                "The session's workers ended before they were ready. Start it again."
            )
        known = (glance for glance in self.view.glances() if glance.detail.isdigit() and glance.rank in self.ranks)
        self._tasks.pids = {glance.rank: int(glance.detail) for glance in known}
        atexit.register(self.close)

    @property
    def name(self) -> str:
        """The name that a person calls it."""
        return self._conductor.facts.name

    @property
    def alive(self) -> bool:
        """Whether it takes tasks."""
        return not self._closing and not self._gone.is_set()

    @property
    def done(self) -> bool:
        """Whether every worker has ended."""
        return self._gone.is_set()

    @property
    def names(self) -> tuple[str, ...]:
        """The variables that some rank had after its last task."""
        return tuple(sorted(set().union(*self._tasks.names.values())))

    @property
    def busy(self) -> tuple[LaunchFacts, ...]:
        """The facts of the cells that run in it now."""
        return tuple(cell.facts for cell in self._tasks.busy)

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
        """Run the text of a cell on all ranks, or on some; returns at once, and raises what `begin` does."""
        # tracebacks name its lines as `Cell In[number], line N`, where line `first_line` is the first one (2 below a
        # magic), and keep them under `filename`; by default the session counts
        __tracebackhide__ = True  # IPython shows the person's own frames alone
        count = next(self._cells)
        number = count if number is None else number
        text = "\n" * (first_line - 1) + source
        filename = filename or f"<cell {number} of session {self._conductor.facts.folder.name}, {count}>"
        sources = CellSources({filename: [line + "\n" for line in text.split("\n")]}, {filename: number})
        sources.install()
        self._conductor.add_sources(sources)
        cell = RunCell(text, filename, number)
        name = name or f"Cell In[{number}]"
        control = self._dispatcher().begin(cell, ranks, name, timeout, outlives_wait=outlives_wait)
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
        invoke = CallFunction(function, tuple(args), dict(kwargs or {}))
        name = str(getattr(function, "__name__", type(function).__name__))
        parts = {name: function, **{f"args[{index}]": value for index, value in enumerate(args)}, **invoke.kwargs}
        return Run(self._dispatcher().begin(invoke, ranks, name, timeout, parts), front_end or FrontEnd())

    def push(self, values: Mapping[str, Any], *, ranks: Sequence[int] | None = None) -> None:
        """Give variables of the workers these values, one copy for all of them until they write to it."""
        __tracebackhide__ = True  # IPython shows the person's own frames alone
        Run(self._dispatcher().begin(PushNames(dict(values)), ranks, "push", parts=values), FrontEnd()).wait()

    def pull(self, names: Sequence[str], *, ranks: Sequence[int] = ()) -> dict[int, dict[str, Any]]:
        """Variables of some ranks, or of the first, by rank and name; tensors come to the CPU."""
        __tracebackhide__ = True  # IPython shows the person's own frames alone
        control = self._dispatcher().begin(PullNames(tuple(names)), ranks or self.ranks[:1], "pull")
        return {result.rank: result.value for result in Run(control, FrontEnd()).wait()}

    def stacks(self) -> str:
        """The stack of every rank, with the lines of the cells; takes up to some seconds where something runs."""
        return self._tasks.stacks()

    def adjust(self, **launching: Any) -> None:
        """Give settings of the launching another value from now on: `stop_grace_period`, `name`, `tags` ..."""
        self.config = self._tasks.config = replace(self.config, launching=replace(self.config.launching, **launching))
        if not launching.keys().isdisjoint({"name", "tags"}):
            self._conductor.rename(self.config.launching.name, self.config.launching.tags)

    def request_stop(self, how: Stop) -> None:
        """Request the end, from any thread, without waiting for it."""
        self._conductor.request_stop(how)

    def close(self) -> None:
        """End the workers, cleanly where they can, on all machines: cells that run are interrupted; returns when all have ended."""
        self._closing = True
        atexit.unregister(self.close)
        for cell in self._tasks.busy:
            self._tasks.interrupt(cell)
        for rank in self.ranks:
            self._conductor.send(rank, CloseSession())
        if not self._gone.wait(self.config.launching.stop_grace_period + FREEING):
            self._conductor.request_stop("kill")
        # a next session may need its port
        self._conductor.over.wait(5)

    def _dispatcher(self) -> TaskDispatcher:
        """What takes tasks; raises a `LaunchError` where the session has ended."""
        __tracebackhide__ = True  # IPython shows the person's own frames alone
        if not self.alive:
            why = f": {self.error}" if self.error is not None else ""
            raise LaunchError(f"A task was sent to a session that has ended{why}. Start another session.")
        return self._tasks

    # ------------------------------------------------------------------------------------------------------ receiving

    def _on_event(self, event: Event) -> None:
        """In the run's thread: a rank is ready, or has replied; or the run is over."""
        if isinstance(event, TaskDone) and event.rank in self.ranks:
            if event.number:
                self._tasks.take(event)
                return
            self._ready.add(event.rank)
            if len(self._ready) == len(self.ranks):
                self._begun.set()
        elif isinstance(event, StateChange) and event.rank is None and event.state in OVER:
            self._end()

    def _end(self) -> None:
        """The workers have ended, whatever the reason."""
        with self._tasks.lock:
            if self.error is None and not self._closing:
                self.error = self._conductor.error
            self._gone.set()
            self._begun.set()
        atexit.unregister(self.close)
        self._tasks.end(self.error)

    def _end_stuck(self, error: HangError) -> None:
        self.error = error
        self.request_stop("kill")


def check_not_launched() -> None:
    """Raise a `LaunchError` in a process that a launcher started."""
    __tracebackhide__ = True  # IPython shows the person's own frames alone
    if already_launched(os.environ):
        raise LaunchError(
            f"A session was requested inside rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, which a launcher "
            "started already. Use %%accelerate in a notebook of its own; a script has no cells to run one after the other."
        )
