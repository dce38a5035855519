"""A run: what a launch gives back, to wait for, to read and to stop; and the front ends that show it."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from accelerate_nb.errors import mark_in_panel, of_this_package
from accelerate_nb.events.event_types import State
from accelerate_nb.events.run_folder import record_problem, shown_path
from accelerate_nb.events.run_state import RunState
from accelerate_nb.failures.exception_copy import raise_as_it_is
from accelerate_nb.failures.rank_result import RankResult, left_out_text
from accelerate_nb.launching.worker_group import Stop
from accelerate_nb.reports.text_format import counted
from accelerate_nb.user_warnings import warn_user

# How often a front end may draw, in seconds.
_BETWEEN_REFRESHES = 0.1


class FrontEnd:
    """A view of a run for a person, which reads the run's state and holds none of it; this one shows nothing."""

    @property
    def shows_failure(self) -> bool:
        """Whether a person sees a failure of the run in this view."""
        return False

    @property
    def shows_record_problem(self) -> bool:
        """Whether a person has read in this view why not all of the run is kept in its folder."""
        return False

    def opened(self, run: Run) -> None:
        """Somebody waits for the run from now on, in the cell that runs at this moment."""

    def refresh(self) -> None:
        """Draw what is new; called some times a second from the waiting thread."""

    def closed(self) -> None:
        """Nobody waits any more: draw the last."""

    def follow(self, run: Run) -> None:
        """Show the run in the cell that runs at this moment, and go on by oneself until it is over; returns at once."""

    def show(self, run: Run) -> None:
        """Show the run in the cell that runs at this moment as well, during the run or after it; returns at once."""


def keep_drawing(run: Run, refresh: Callable[[], None], closed: Callable[[], None]) -> threading.Thread:
    """Call `refresh` again and again until a run is over, then `closed`, in a thread of its own; returns at once."""

    def draw() -> None:
        pause = threading.Event()
        while not run.done:
            pause.wait(_BETWEEN_REFRESHES)
            refresh()
        closed()

    # ipykernel knows by the context which cell a thread's output belongs to
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(draw,), name="accelerate_nb panel", daemon=True)
    thread.start()
    return thread


@dataclass(frozen=True, slots=True)
class LaunchFacts:
    """The facts of a run that are known from its first moment: in this process, or from its folder."""

    name: str
    why: str
    folder: Path
    started: float
    results: Literal["main", "all"]
    stop_grace_period: float
    tags: tuple[str, ...] = ()
    # what was launched, and its arguments as texts, where they are known
    function: str = ""
    arguments: Mapping[str, str] | None = None
    # those that run it; without any all of them
    ranks: tuple[int, ...] = ()
    # of a session, whose workers stay; it outlives the process that launched it; it goes on where a wait for it is interrupted
    is_cell: bool = False
    is_detached: bool = False
    outlives_wait: bool = False


class RunControl(Protocol):
    """The way to a run's workers: `Conductor`, `RemoteConductor` of a detached run, `CellControl` of a cell; each as `Run` has it."""

    facts: LaunchFacts
    view: RunState
    # set when every worker has ended
    over: threading.Event

    @property
    def is_going_on(self) -> bool:
        """Whether it has begun, and may still end by itself."""

    @property
    def trouble(self) -> OSError | None:
        """The reason why not everything could be kept in the run's folder."""

    @property
    def rank_results(self) -> tuple[RankResult, ...]: ...
    @property
    def error(self) -> BaseException | None: ...
    @property
    def main_rank(self) -> int: ...
    def start(self) -> None: ...
    def log_file(self, rank: int) -> Path: ...
    def stacks(self) -> str: ...
    def request_stop(self, how: Stop) -> None: ...
    def set_knob(self, name: str, value: float) -> None: ...
    def profile(self, steps: int = 10, ranks: Iterable[int] | None = None) -> None: ...


class Run:
    """
    Workers that run a function or a cell; `launch(...)` gives one, and `attach(...)` one that outlives its notebook.

    It is waited for with `run.wait()`, or in a notebook that should go on meanwhile with `await run`. As the last line of
    a cell, `run` shows itself there, too.

    >>> run = launch(train, num_processes=2)
    >>> run.wait()
    """

    def __init__(self, control: RunControl, front_end: FrontEnd) -> None:
        self._control, self._front_end = control, front_end
        self.view, facts = control.view, control.facts
        self.name, self.why, self.folder, self.started = facts.name, facts.why, facts.folder, facts.started
        # its tags, what was launched, and the arguments of that as texts
        self.tags, self.function, self.arguments = facts.tags, facts.function, facts.arguments
        # whether it outlives the process that launched it
        self.is_detached = facts.is_detached
        self._is_followed = False
        self._warned: set[str] = set()

    @property
    def done(self) -> bool:
        """Whether every worker has ended."""
        return self._control.over.is_set()

    @property
    def state(self) -> State:
        """Its state in a word: `starting`, `running`, `stopping`, `finished`, `failed` or `stopped`; `view` holds all of it as values."""
        return self.view.state

    @property
    def error(self) -> BaseException | None:
        """The exception that `wait` raises once the run is done; `None` without one, and for the interrupt of a wait."""
        return self._control.error

    @property
    def main_rank(self) -> int:
        """The rank whose value is the run's result: the first one of this process's node."""
        return self._control.main_rank

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that run it, in order: all, but for a cell that only some of a session's run."""
        return self._control.facts.ranks or self.view.ranks

    @property
    def seconds(self) -> float:
        """The seconds for which it has run, or ran."""
        return (self.view.ended or time.time()) - self.started

    @property
    def rank_results(self) -> tuple[RankResult, ...]:
        """How each rank ended, in the order of ranks: its value or its failure; empty while it runs."""
        return self._control.rank_results

    @property
    def results(self) -> list[Any]:
        """
        The return value of each rank's function, in the order of ranks; empty while it runs.

        It is `None` for a rank that failed, and where a part of the value can't travel, which a warning names. Those of a detached run are
        unpickled here: where a value's class is one of a notebook's, the cell that defines it has to run first.
        """
        rank_results = self._control.rank_results
        text = left_out_text(self.name, {item.rank: item.left_out for item in rank_results})
        if text and text not in self._warned:
            self._warned.add(text)
            warn_user(text)
        return [rank_result.value for rank_result in rank_results]

    @property
    def record_problem(self) -> str:
        """Why not all of the run is kept in its folder, and what to do; empty where nothing is lost."""
        return record_problem(self.folder, self._control.trouble)

    def wait_until_over(self, timeout: float | None) -> bool:
        """Wait for so many seconds at most, and show nothing; whether the run is over."""
        return self._control.over.wait(timeout)

    def log_file(self, rank: int) -> Path:
        """
        The file that holds all that a rank wrote so far, since the last restart; there is none where it wrote nothing.

        Of a rank on another machine that wrote megabytes, lines in it name the node and the file on it that has what is left out.
        """
        return self._control.log_file(rank)

    def logs(self, rank: int) -> str:
        """All that a rank wrote, since the last restart; undecodable bytes are shown as escapes."""
        path = self.log_file(rank)
        return path.read_bytes().decode(errors="backslashreplace") if path.exists() else ""

    def stacks(self) -> str:
        """The position of every rank that still runs: which wait for which, then every stack with the notebook's own lines."""
        return self._control.stacks()

    def __repr__(self) -> str:
        ranks = counted(len(self.ranks), "rank")
        return f"<Run of {self.name}: {self.state}, {ranks}, output in {shown_path(self.folder)}>"

    def _ipython_display_(self) -> None:
        self._front_end.show(self)

    def start(self) -> Run:
        """Begin, in the background, and return this run; one of this very process is over then, one that was attached to is followed."""
        self._control.start()
        return self

    def wait(self, timeout: float | None = None) -> Any:
        """
        Wait for the run, show it meanwhile, and return what it returned: rank 0's value, or with `results="all"` a list.

        Raises `WorkerError` (also of the class that the worker raised), `HangError` where the run's own time was over,
        `TimeoutError` where only this wait's `timeout` (seconds) was, and `KeyboardInterrupt` after the workers have
        been ended because of one.

        A cell of a session gives how each rank ended (`rank_results`); an interrupt ends the cell, and a second one the session.
        """
        __tracebackhide__ = True  # IPython shows the person's own frames alone
        deadline = None if timeout is None else time.monotonic() + timeout
        interrupted = self._show_until(deadline)
        facts = self._control.facts
        if interrupted and facts.outlives_wait:
            text = f"the wait was interrupted, and {self.name} goes on. `run.stop()` ends it. All output: {shown_path(self.folder)}"
            error: BaseException | None = of_this_package(KeyboardInterrupt(text))
        elif interrupted and not facts.is_cell:
            text = f"the run was interrupted, and its workers have ended. All output: {shown_path(self.folder)}"
            error = of_this_package(KeyboardInterrupt(text))
        elif not self.done:
            text = f"The run has not ended after {timeout:g} s of waiting. It goes on; wait again, or stop it."
            error = of_this_package(TimeoutError(text))
        else:
            error = self.error
        return self._outcome(error)

    def __await__(self) -> Generator[Any, None, Any]:
        """
        Wait for the run while the notebook goes on, and give or raise what `wait()` does.

        A wait that is cancelled, by the notebook's interrupt too, ends the workers first, as an interrupt of `wait()` does;
        `asyncio.shield(run)` leaves them alone.

        >>> await run
        """
        __tracebackhide__ = True
        return self._awaited().__await__()

    def follow(self) -> None:
        """Show the run under the cell that runs at this moment, and go on until it is over; returns at once."""
        if not self._is_followed:
            self._is_followed = True
            self._front_end.follow(self)

    def stop(self, timeout: float | None = None) -> None:
        """
        End the workers: they are asked to stop, all after the same optimizer step, and may save and return what they have.

        Where no steps are made, they stop at the same check of `Accelerator.stop_requested`. Ranks that do neither, or don't
        come to it within `stop_grace_period` and the time that some steps or checks took so far, are interrupted. They are killed
        where they don't end within another `stop_grace_period`; so are all after `timeout` seconds.
        """
        self.request_stop("finish")
        if not self._control.is_going_on:
            return
        if not self._control.over.wait(timeout):
            self.request_stop("interrupt")
            self._control.over.wait(self._control.facts.stop_grace_period + 5)

    def request_stop(self, how: Stop) -> None:
        """
        Request the end, from any thread, without waiting for it.

        "finish" lets every rank end after the same step, "interrupt" interrupts them where they are, "kill" just ends them. Of a cell of a
        session, the first two interrupt the cell, the last one ends the session.
        """
        self._control.request_stop(how)

    def interrupt(self) -> None:
        """Interrupt the ranks where they are, without waiting for them; a cell's session goes on."""
        self.request_stop("interrupt")

    def set_knob(self, name: str, value: float) -> None:
        """
        Change a knob that the training has declared (`Accelerator.knob`), on all ranks after the same optimizer step.

        Returns at once. Raises `ConfigurationError` for a name that no knob has, or a value out of its bounds, and `StateError` where
        the run is over or stops.

        >>> run.set_knob("lr", 1e-4)
        """
        self._control.set_knob(name, value)

    def profile(self, steps: int = 10, ranks: Iterable[int] | None = None) -> None:
        """
        Have ranks, by default all, profile their next optimizer steps with torch's profiler while the run goes on.

        Returns at once. The panel shows the costliest operations, and offers the trace (Perfetto's format), which is in the run's folder too;
        `run.view.rank(0).profile` holds them. Any optimizer of torch makes steps. Raises `ConfigurationError` for other than 1 to 100 steps or
        an unknown rank, `StateError` where ranks don't run or profile already, and `NotYetError` where they can't be reached.

        >>> run.profile(steps=10, ranks=[0])
        """
        self._control.profile(steps, ranks)

    def _interrupt(self, interrupts: int) -> bool:
        """Act on an interrupt of a wait, which has had so many; whether the wait ends at once, since the run goes on without it."""
        outlives_wait = self._control.facts.outlives_wait
        if not outlives_wait:
            self.request_stop("interrupt" if interrupts == 1 else "kill")
        return outlives_wait

    def _outcome(self, error: BaseException | None) -> Any:
        __tracebackhide__ = True
        if self._control.trouble is not None and not self._front_end.shows_record_problem:
            warn_user(self.record_problem, RuntimeWarning)
        if error is not None:
            if self._front_end.shows_failure:
                mark_in_panel(error)
            raise_as_it_is(error)
        if self._control.facts.is_cell:
            return self.rank_results
        return self.results if self._control.facts.results == "all" else self.results[self.main_rank]

    async def _awaited(self) -> Any:
        __tracebackhide__ = True
        self.follow()
        cancelled: asyncio.CancelledError | None = None
        while not self.done:
            try:
                # not one long wait: the kernel's interrupt does not wake a loop that sleeps (tornado's `add_callback`)
                await asyncio.sleep(_BETWEEN_REFRESHES)
            except asyncio.CancelledError as error:
                is_over = self._interrupt(1 if cancelled is None else 2)
                cancelled = error
                if is_over:
                    raise
        return self._outcome(cancelled or self.error)

    def _show_until(self, deadline: float | None) -> bool:
        """Show the run until it is over or the time is; whether it was interrupted."""
        __tracebackhide__ = True
        interrupts = 0
        try:
            try:
                self._front_end.opened(self)
            except KeyboardInterrupt:
                interrupts += 1
                if self._interrupt(interrupts):
                    return True
            while not self._control.over.is_set() and (deadline is None or time.monotonic() < deadline):
                try:
                    self._control.over.wait(_BETWEEN_REFRESHES)
                    self._front_end.refresh()
                except KeyboardInterrupt:
                    interrupts += 1
                    if self._interrupt(interrupts):
                        return True
        finally:
            self._front_end.closed()
        return interrupts > 0
