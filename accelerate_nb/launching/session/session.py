"""A session: a run whose workers stay, and keep their variables from one cell to the next."""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from accelerate_nb.config.environment import already_launched
from accelerate_nb.config.ranks import listed, of_ranks
from accelerate_nb.config.run import RunConfig
from accelerate_nb.devices.probe import probe
from accelerate_nb.errors import ConfigurationError, HangError, LaunchError
from accelerate_nb.events.model import OVER, Answered, Event, Failure, StateChange
from accelerate_nb.events.view import RunView
from accelerate_nb.launching import cells
from accelerate_nb.launching.attempt import Stop
from accelerate_nb.launching.blame import hang_error, worker_error
from accelerate_nb.launching.cell_run import CellEnd, CellRun
from accelerate_nb.launching.choosing import choose
from accelerate_nb.launching.culprits import explain
from accelerate_nb.launching.ending import Ending
from accelerate_nb.launching.functions import prepare
from accelerate_nb.launching.main_module import is_of_main
from accelerate_nb.launching.packing import map_entries, memory_file, write_entries
from accelerate_nb.launching.pickling import dump, load
from accelerate_nb.launching.run import Run, Watched
from accelerate_nb.launching.sources import Sources, sources_here
from accelerate_nb.launching.tasks import RETURNED, Answer, Cell, Invoke, Letter, Pull, Push, Task

_BETWEEN_REFRESHES = 0.1
# After one rank has failed: how long the others may still come to their own end before they are interrupted.
_SETTLE = 0.5
# What an interrupted rank gets, beside the grace, to be freed from what it waits for (see `cells`).
_FREEING = 1.0


class _Unseen:
    """A session's own front end: cells have theirs."""

    def opened(self, run: Watched) -> None:
        """Nothing is drawn."""

    def refresh(self) -> None:
        """Nothing is drawn."""

    def closed(self) -> None:
        """Nothing is drawn."""

    def follow(self, run: Watched) -> None:
        """Nothing is drawn."""

    def show(self, run: Watched) -> None:
        """Nothing is drawn."""


@dataclass(slots=True)
class _Open:
    """A cell that runs: where its ranks leave their answers, what is to happen later, why it was ended."""

    cell: CellRun
    answers: dict[int, int]
    timers: list[threading.Timer] = field(default_factory=list)
    failed: bool = False
    timeout: float | None = None
    stacks: str | None = None

    def later(self, seconds: float, do: Callable[[_Open], None]) -> None:
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


class Session:
    r"""
    Workers that stay, and run one cell after the other; each has `accelerator`, `rank`, `world_size` and `device`.

    >>> session = Session.start(resolve({"num_processes": 2}, {}))
    >>> session.run("x = rank + 1\nprint(x)").wait()
    >>> session.pull(["x"], ranks=(0, 1))
    {0: {'x': 1}, 1: {'x': 2}}
    >>> session.close()
    """

    @classmethod
    def start(cls, config: RunConfig, *, refresh: Callable[[], None] = lambda: None) -> Session:
        """
        Start the workers, and come back when they are ready for their first cell; `refresh` is called while one waits.

        `config.launching.timeout` is the time for each cell. Raises `LaunchError` or `WorkerError` where they can't start,
        a `LaunchError` also in a process that a launcher started, and `KeyboardInterrupt` after they have been ended because of one.
        """
        __tracebackhide__ = True  # IPython shows the person's own frames alone
        check_not_launched()
        if config.launching.engine == "inline":
            raise LaunchError(
                "engine='inline' was asked for, but a session's workers are processes of their own. Leave engine out."
            )
        _check_no_threads(config)
        session = cls(config)
        session._begin_run(refresh)
        return session

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._lock = threading.RLock()
        self._ready: set[int] = set()
        self._begun, self._gone = threading.Event(), threading.Event()
        self._open: dict[int, _Open] = {}
        self._numbers, self._cells = itertools.count(1), itertools.count(1)
        self._counts: dict[int, Mapping[str, int]] = {}
        self._names: dict[int, tuple[str, ...]] = {}
        self._broken = False
        self._closing = False
        self._error: BaseException | None = None
        # a cell's time and silence are its own
        own = replace(config.launching, timeout=None, max_restarts=0, quiet=0.0, results="main")
        self._run: Run = prepare(cells.session, (), replace(config, launching=own), _Unseen(), self._hear)

    def _begin_run(self, refresh: Callable[[], None]) -> None:
        __tracebackhide__ = True  # IPython shows the person's own frames alone
        _ = self._run.start()
        try:
            while not self._begun.wait(_BETWEEN_REFRESHES):
                refresh()
        except BaseException:
            self.ask("kill")
            self._gone.wait(self._config.launching.grace + 5)
            raise
        if self._gone.is_set():
            raise self._run.error or LaunchError("The session's workers ended before they were ready. Start it again.")
        self._pids = {one.rank: int(one.detail) for one in self.view.glances() if one.detail.isdigit()}
        atexit.register(self.close)

    @property
    def config(self) -> RunConfig:
        """The wish that the session was started with."""
        return self._config

    @property
    def name(self) -> str:
        """What a person calls it."""
        return self._run.name

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.view.ranks)

    @property
    def view(self) -> RunView:
        """Everything that has happened so far."""
        return self._run.view

    @property
    def folder(self) -> Path:
        """Where every rank's output, the metrics and the events are kept."""
        return self._run.folder

    @property
    def why(self) -> str:
        """How many workers there are, what placed them, and why."""
        return self._run.why

    @property
    def started(self) -> float:
        """When the session began, in seconds since 1970."""
        return self._run.started

    @property
    def alive(self) -> bool:
        """Whether it can be asked for something."""
        return not self._closing and not self._gone.is_set()

    @property
    def done(self) -> bool:
        """Whether every worker has ended."""
        return self._gone.is_set()

    @property
    def error(self) -> BaseException | None:
        """Why it ended, where that was not asked for: a `WorkerError` with a worker's last words, a `LaunchError`."""
        return self._error

    @property
    def names(self) -> tuple[str, ...]:
        """The variables that some rank had when it was last asked for something."""
        return tuple(sorted(set().union(*self._names.values())))

    @property
    def busy(self) -> tuple[CellRun, ...]:
        """What runs in it now."""
        with self._lock:
            return tuple(one.cell for one in self._open.values())

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
        silent: bool = False,
    ) -> CellRun:
        """
        Run the text of a cell on all ranks, or on some; comes back at once.

        Tracebacks name its lines as `Cell In[number], line N`; `first_line` is the number of its first one (2 where a line
        with a magic stood above it). `name` is what a person calls it, `filename` under what name its lines are kept;
        without them they are made from the number, without which the session counts. `timeout` in seconds, or that of the
        session's configuration. A `silent` cell leaves no `_`, no `Out[number]` and no result.

        Raises `LaunchError` where the session has ended, or one of these ranks still runs something else, and
        `ConfigurationError` where there is no such rank.
        """
        __tracebackhide__ = True  # IPython shows the person's own frames alone
        own = next(self._cells)
        number = own if number is None else number
        text = "\n" * (first_line - 1) + source
        filename = filename or f"<cell {number} of session {self._run.folder.name}, {own}>"
        sources = Sources({filename: [line + "\n" for line in text.split("\n")]}, {filename: number})
        sources.install()
        self._run.learn(sources)
        cell = Cell(text, filename, number, silent)
        return self._begin(cell, ranks, name or f"Cell In[{number}]", timeout)

    def call(
        self,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        ranks: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> CellRun:
        """
        Call a function of the notebook in the workers; each rank's `CellEnd` has what it returned as `value`.

        Comes back at once. Raises `PayloadError` where function or arguments can't travel, and what `run` raises.
        """
        __tracebackhide__ = True  # IPython shows the person's own frames alone
        invoke = Invoke(function, tuple(args), dict(kwargs or {}))
        name = str(getattr(function, "__name__", type(function).__name__))
        parts = {name: function, **{f"args[{index}]": value for index, value in enumerate(args)}, **invoke.kwargs}
        return self._begin(invoke, ranks, name, timeout, parts)

    def push(
        self,
        values: Mapping[str, Any],
        *,
        ranks: Sequence[int] | None = None,
        refresh: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Give variables of the workers these values, one copy for all of them until they write to it.

        Raises `PayloadError`, which names what can't travel, and what `run` raises.
        """
        __tracebackhide__ = True  # IPython shows the person's own frames alone
        self._begin(Push(dict(values)), ranks, "push", None, values).wait(refresh)

    def pull(
        self, names: Sequence[str], *, ranks: Sequence[int] = (0,), refresh: Callable[[], None] = lambda: None
    ) -> dict[int, dict[str, Any]]:
        """
        The values of variables of some ranks, by rank and name; tensors come to the CPU, without their gradients' history.

        Raises a `WorkerError` that is also a `NameError` for a name that is not there (it lists those that are), or a
        `PayloadError` for a value that can't travel, and what `run` raises.
        """
        __tracebackhide__ = True  # IPython shows the person's own frames alone
        ends = self._begin(Pull(tuple(names)), ranks, "pull", None).wait(refresh)
        return {end.rank: end.value for end in ends}

    def stacks(self) -> str:
        """Where every rank is now, with the lines of the cells; takes up to some seconds where something runs."""
        if not self.busy:
            return "Every rank waits for a cell." if self.alive else ""
        return self._run.stacks()

    def adjust(self, **launching: Any) -> None:
        """
        Give settings of the launching another value from now on: `grace`, and what front ends read.

        >>> session.adjust(grace=5.0)
        """
        self._config = replace(self._config, launching=replace(self._config.launching, **launching))

    def ask(self, how: Stop) -> None:
        """Ask for the end, from any thread, without waiting for it."""
        self._run.ask(how)

    def close(self) -> None:
        """End the workers, in order where they can: what runs is interrupted; comes back when all have ended."""
        with self._lock:
            self._closing = True
            running = [one.cell for one in self._open.values()]
        atexit.unregister(self.close)
        for cell in running:
            self.interrupt(cell)
        for rank in range(self.size):
            self._run.tell(rank, {"do": "close"})
        if not self._gone.wait(self._config.launching.grace + _FREEING):
            self._run.ask("kill")
            self._gone.wait(5)

    # ------------------------------------------------------------------------------------------ what cells ask for

    def log_file(self, rank: int) -> Path:
        """The file that holds all that a rank wrote so far; there is none where it wrote nothing."""
        return self._run.log_file(rank)

    def interrupt(self, cell: CellRun) -> None:
        """Interrupt a cell on every rank that has not ended it; a rank that does not come back ends the session."""
        with self._lock:
            one = self._open.get(cell.number)
            if one is None:
                return
            for rank in one.answers:
                self._run.tell(rank, {"do": "interrupt", "number": cell.number, "others": self._others(rank)})
            one.later(_FREEING + self._config.launching.grace, self._give_up)

    def kill(self) -> None:
        """End every worker at once."""
        self._run.ask("kill")

    # ------------------------------------------------------------------------------------------------------ sending

    def _begin(
        self,
        task: Task,
        ranks: Sequence[int] | None,
        name: str,
        timeout: float | None,
        parts: Mapping[str, Any] | None = None,
    ) -> CellRun:
        __tracebackhide__ = True  # IPython shows the person's own frames alone
        wanted = self._checked(ranks)
        letter = _written(task, parts)
        try:
            with self._lock:
                self._check_free(wanted, name)
                cell = CellRun(self, name, wanted, next(self._numbers))
                self._open[cell.number] = one = _Open(cell, {})
                self._run.listen_anew(self._config.launching.quiet)
                self._send(one, letter, meets=isinstance(task, (Cell, Invoke)))
        finally:
            os.close(letter)
        limit = self._config.launching.timeout if timeout is None else timeout
        if limit is not None and not isinstance(task, (Push, Pull)):
            one.timeout = limit
            one.later(limit, self._be_late)
        return cell

    def _send(self, one: _Open, letter: int, *, meets: bool) -> None:
        """Send a letter to the cell's ranks; where groups are to be made anew first, all ranks have a part in it."""
        renewal = f"{one.cell.number}" if meets and self._broken and self.size > 1 else None
        if renewal is not None:
            self._check_free(range(self.size), one.cell.name)
            self._broken = False
        for rank in range(self.size):
            is_asked = rank in one.cell.ranks
            if not is_asked and renewal is None:
                continue
            message = {"do": "task", "number": one.cell.number, "renewal": renewal, "others": self._others(rank)}
            answer = memory_file("accelerate_nb_answer")
            body = letter if is_asked else _written(None)
            self._run.tell(rank, message, (body, answer))
            if is_asked:
                one.answers[rank] = answer
            else:
                os.close(answer)
                os.close(body)

    def _others(self, rank: int) -> list[int]:
        return [pid for other, pid in self._pids.items() if other != rank]

    def _checked(self, ranks: Sequence[int] | None) -> tuple[int, ...]:
        __tracebackhide__ = True  # IPython shows the person's own frames alone
        if not self.alive:
            why = f": {self._error}" if self._error is not None else ""
            raise LaunchError(f"Something was asked of a session that has ended{why}. Start another one.")
        wanted = tuple(range(self.size)) if ranks is None else tuple(sorted(set(ranks)))
        if not wanted or not set(wanted) <= set(range(self.size)):
            raise ConfigurationError(
                f"ranks={list(ranks or ())} was asked for, but the session's ranks are 0 to {self.size - 1}. "
                "Name some of these, or none for all."
            )
        return wanted

    def _check_free(self, wanted: Sequence[int], name: str) -> None:
        __tracebackhide__ = True  # IPython shows the person's own frames alone
        for one in self._open.values():
            both = sorted(set(wanted) & set(one.answers))
            if both:
                raise LaunchError(
                    f"{name} was asked of {of_ranks(both, listed)}, still busy with "
                    f"{one.cell.name}. Wait for it, or interrupt it."
                )

    # ------------------------------------------------------------------------------------------------------ hearing

    def _hear(self, event: Event) -> None:
        """In the run's thread: a rank is ready, or has answered; or the run is over."""
        if isinstance(event, Answered) and event.number == 0:
            self._ready.add(event.rank)
            if len(self._ready) == self.size:
                self._begun.set()
        elif isinstance(event, Answered):
            with self._lock:
                self._take(event)
        elif isinstance(event, StateChange) and event.rank is None and event.state in OVER:
            self._end()

    def _take(self, event: Answered) -> None:
        one = self._open.get(event.number)
        if one is None or event.rank not in one.answers:
            # it only took part in making groups anew
            return
        answer = _read(one.answers.pop(event.rank), event.rank)
        self._counts[event.rank] = answer.groups
        failure = answer.failure
        value = answer.value if answer.value is None or RETURNED not in answer.value else answer.value[RETURNED]
        ok, metadata = failure is None, dict(answer.metadata)
        end = CellEnd(event.rank, ok, answer.seconds, answer.result, value, failure, answer.error, metadata)
        self._names[event.rank] = answer.names
        if failure is not None and (failure.ended_by_us or failure.lost_connection or answer.in_collective):
            self._broken = True
        is_last = one.cell.take(end)
        if failure is not None and not one.failed:
            one.failed = True
            if not is_last:
                one.later(_SETTLE, self._settle)
        if is_last:
            self._finish(one)

    def _finish(self, one: _Open) -> None:
        one.close()
        del self._open[one.cell.number]
        if not self._open:
            # workers that have nothing to do say nothing
            self._run.listen_anew(0.0)
        if one.failed and any(counts != self._counts[0] for counts in self._counts.values() if 0 in self._counts):
            # a collective was begun by some ranks only, and waits for the others
            self._broken = True
        one.cell.finish(self._error_of(one))

    def _error_of(self, one: _Open) -> BaseException | None:
        ends = one.cell.ends
        failures = [end.failure for end in ends if end.failure is not None]
        endings = [Ending(end.rank, value=end.value, failure=end.failure, error=end.error) for end in ends]
        if not failures:
            return None
        if one.stacks is not None and one.timeout is not None:
            return hang_error(one.timeout, one.stacks, endings, self.folder)
        if one.cell.was_interrupted and all(each.ended_by_us or each.lost_connection for each in failures):
            return KeyboardInterrupt(f"{one.cell.name} was interrupted; the session goes on, with its variables")
        return worker_error(endings, self.folder)

    # ------------------------------------------------------------------------------------- what happens after a while

    def _settle(self, one: _Open) -> None:
        """A rank has failed, and others go on: they may wait for it for ever."""
        self.interrupt(one.cell)

    def _be_late(self, one: _Open) -> None:
        one.stacks = self.stacks()
        self.interrupt(one.cell)

    def _give_up(self, one: _Open) -> None:
        """An interrupt was not followed."""
        stuck = ", ".join(map(str, sorted(one.answers)))
        error = HangError()
        error.message = (
            f"{one.cell.name} was to be interrupted, and rank {stuck} had not come back after "
            f"{_FREEING + self._config.launching.grace:g} s. The session was ended; it was here:\n\n"
            f"{one.stacks or self.stacks()}\n\nAll output: {self.folder}"
        )
        error.folder = str(self.folder)
        with self._lock:
            if one.cell.done:
                return
            self._error = error
        self.kill()

    def _end(self) -> None:
        """The workers have ended, whatever the reason."""
        with self._lock:
            if self._error is None and not self._closing:
                self._error = self._run.error
            over, self._open = list(self._open.values()), {}
            self._gone.set()
            self._begun.set()
        atexit.unregister(self.close)
        for one in over:
            one.close()
            for answer in one.answers.values():
                os.close(answer)
            one.cell.finish(
                self._error
                or LaunchError(f"{one.cell.name} was still running when the session was ended. Start another session.")
            )


def check_not_launched() -> None:
    """Raise a `LaunchError` in a process that a launcher started."""
    __tracebackhide__ = True  # IPython shows the person's own frames alone
    if already_launched(os.environ):
        raise LaunchError(
            f"A session was asked for inside rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, which a launcher "
            "started already. Use %%accelerate in a notebook of its own; a script has no cells to run one after the other."
        )


def _check_no_threads(config: RunConfig) -> None:
    """Raise a `LaunchError` where several ranks would be threads of one process."""
    __tracebackhide__ = True  # IPython shows the person's own frames alone
    choice = choose(config.launching, probe(), can_fork=hasattr(os, "fork"), mesh=config.training.xla_mesh)
    if choice.per_process > 1:
        raise LaunchError(
            f"A session was asked for on {choice.size} devices, of which one process drives {choice.per_process}, each in a "
            "thread; but a session's ranks run cells in the main thread of a process of their own. Pass num_processes=1, or "
            "xla_mesh='data' for one rank that computes on all devices; a function runs on all of them by notebook_launcher."
        )


def _written(task: Task | None, parts: Mapping[str, Any] | None = None) -> int:
    """A letter in a memory file; raises `PayloadError` for what of its `parts` can't travel."""
    __tracebackhide__ = True  # IPython shows the person's own frames alone
    sources = sources_here() if parts is not None else Sources({}, {})
    names: dict[str, Any] = {}
    try:
        entries = dump(Letter(task, _known_here(), sources.lines, sources.numbers, names), names)
    except Exception as error:  # noqa: BLE001 - a pickler calls anybody's code, which may raise anything
        raise explain(parts or {}, error, sources) from None
    descriptor = memory_file("accelerate_nb_letter")
    try:
        write_entries(descriptor, entries)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _known_here() -> frozenset[str]:
    """The functions and classes of the notebook."""
    return frozenset(name for name, value in list(vars(sys.modules["__main__"]).items()) if is_of_main(value))


def _read(descriptor: int, rank: int) -> Answer:
    try:
        answer: Answer = load(map_entries(descriptor))
    except Exception as error:  # noqa: BLE001 - unpickling runs anybody's code
        kind, message = type(error).__qualname__, f"what it brought back can't be unpacked here: {error}"
        return Answer(0.0, failure=Failure(rank, kind, message, traceback="", time=time.time()), error=error)
    finally:
        os.close(descriptor)
    return answer
