"""A run: what a launch gives back, to wait for, to read and to stop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from accelerate_nb.errors import HangError, LaunchError, StoppedError, of_this_package
from accelerate_nb.events.model import State, StateChange
from accelerate_nb.events.run_state import RunState
from accelerate_nb.failures.exception_copy import raise_as_it_is
from accelerate_nb.failures.hang_report import StackSnapshot, diagnosis
from accelerate_nb.failures.rank_result import RankResult
from accelerate_nb.failures.stack_dumps import stacks_text
from accelerate_nb.failures.worker_error import hang_error, stopped_error, worker_error
from accelerate_nb.launching.front_end import FrontEnd
from accelerate_nb.launching.resource_monitor import ResourceMonitor
from accelerate_nb.launching.run_context import RunContext, Stop, stronger
from accelerate_nb.sources.cells import CellSources
from accelerate_nb.user_warnings import warn_user

# How often the front end may draw while somebody waits.
_BETWEEN_REFRESHES = 0.1


class WorkerGroupLike(Protocol):
    """One group of workers; a run has another after a restart."""

    timed_out: StackSnapshot | None
    lost: str | None

    @property
    def began(self) -> bool:
        """Whether the function has begun on some rank."""

    @property
    def stopped_at(self) -> str | None:
        """The point at which ranks stopped on request."""

    def follow(self) -> tuple[RankResult, ...]:
        """Run to the end."""

    def stop(self, how: Stop) -> None:
        """Request the end, from any thread."""

    def send(self, rank: int, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> bool:
        """Send a message to a worker's inbox; whether it could be delivered."""

    def restart_watchdog(self, timeout: float) -> None:
        """Restart the idle watchdog, which warns after so many seconds."""

    def snapshot(self) -> StackSnapshot:
        """The stacks and collectives of every rank now."""


class Run:
    """
    Workers that run a function; `launch(...)` gives one.

    It is waited for with `run.wait()`, or in a notebook that should go on meanwhile with `await run`. As the last line of
    a cell, `run` shows itself there, too.

    >>> run = launch(train, num_processes=2)
    >>> run.wait()
    """

    def __init__(
        self,
        *,
        run_context: RunContext,
        worker_group: Callable[[int], WorkerGroupLike],
        max_restarts: int,
        timeout: float | None,
        results: Literal["main", "all"],
        front_end: FrontEnd,
        name: str,
        why: str,
        at_end: Callable[[tuple[RankResult, ...]], None],
        sampler: ResourceMonitor,
    ) -> None:
        self.name, self.why = name, why
        self.started = time.time()
        self._run_context, self._make_worker_group, self._max_restarts = run_context, worker_group, max_restarts
        self._timeout, self._wanted, self._front_end = timeout, results, front_end
        self._at_end, self._sampler = at_end, sampler
        self._worker_group: WorkerGroupLike | None = None
        self._stopped: Stop | None = None
        self._rank_results: tuple[RankResult, ...] = ()
        self._error: BaseException | None = None
        self._over = threading.Event()
        self._is_followed = False
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------------------------------------------ reading

    @property
    def view(self) -> RunState:
        """Everything that has happened so far."""
        return self._run_context.view

    @property
    def folder(self) -> Path:
        """The folder with every rank's output, the metrics and the events."""
        return self._run_context.record.folder

    @property
    def done(self) -> bool:
        """Whether every worker has ended."""
        return self._over.is_set()

    @property
    def error(self) -> BaseException | None:
        """The exception that `wait` raises once the run is done; `None` without one, and for the interrupt of a wait."""
        return self._error

    @property
    def results(self) -> list[Any]:
        """The return value of each rank's function, in the order of ranks; `None` for one that failed; empty while it runs."""
        return [rank_result.value for rank_result in self._rank_results]

    def log_file(self, rank: int) -> Path:
        """The file that holds all that a rank wrote so far; there is none where it wrote nothing."""
        self._run_context.record.flush()
        return self.folder / f"rank_{rank}.log"

    def logs(self, rank: int) -> str:
        """All that a rank wrote; undecodable bytes are shown as escapes."""
        path = self.log_file(rank)
        return path.read_bytes().decode(errors="backslashreplace") if path.exists() else ""

    def send(self, rank: int, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> bool:
        """Send a message to a worker's inbox; whether it could be delivered."""
        worker_group = self._worker_group
        return worker_group is not None and worker_group.send(rank, message, descriptors)

    def restart_watchdog(self, timeout: float) -> None:
        """Restart the idle watchdog, since workers got a new task; it warns after so many seconds, with 0 never."""
        if (worker_group := self._worker_group) is not None:
            worker_group.restart_watchdog(timeout)

    def add_sources(self, sources: CellSources) -> None:
        """Add cells that stacks may name."""
        known = self._run_context.sources
        self._run_context.sources = CellSources({**known.lines, **sources.lines}, {**known.numbers, **sources.numbers})

    def stacks(self) -> str:
        """The position of every rank that still runs: which wait for which, then every stack with the notebook's own lines."""
        worker_group = self._worker_group
        return "" if worker_group is None or self.done else self._snapshot_text(worker_group.snapshot())

    def __repr__(self) -> str:
        ranks = len(self.view.ranks)
        count = f"{ranks} rank{'' if ranks == 1 else 's'}"
        return f"<Run of {self.name}: {self.view.state}, {count}, output in {self.folder}>"

    def _ipython_display_(self) -> None:
        self._front_end.show(self)

    # ------------------------------------------------------------------------------------------------------- acting

    def start(self) -> Run:
        """Begin, in a thread of the run's own."""
        self._thread = threading.Thread(target=self._conduct, name="accelerate_nb run", daemon=True)
        self._thread.start()
        return self

    def wait(self, timeout: float | None = None) -> Any:
        """
        Wait for the run, show it meanwhile, and return what it returned: rank 0's value, or with `results="all"` a list.

        Raises `WorkerError` (also of the class that the worker raised), `HangError` where the run's own time was over,
        `TimeoutError` where only this wait's `timeout` (seconds) was, and `KeyboardInterrupt` after the workers have
        been ended because of one.
        """
        __tracebackhide__ = True  # IPython shows the person's own frames alone
        deadline = None if timeout is None else time.monotonic() + timeout
        interrupted = self._show_until(deadline)
        self._warn_of_trouble()
        return self._outcome(self._what_happened(interrupted, timeout))

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
        if self._thread is None or not self._thread.is_alive():
            return
        if not self._over.wait(timeout):
            self.request_stop("interrupt")
            self._over.wait(self._run_context.stop_grace_period + 5)

    def request_stop(self, how: Stop) -> None:
        """Request the end, from any thread, without waiting for it: "finish", "interrupt" or "kill" (see `RunHandle`)."""
        if self.done:
            return
        if self._stopped is None:
            self._run_context.take(StateChange(None, "stopping", time.time(), "as requested"))
        self._stopped = stronger(self._stopped, how)
        if (worker_group := self._worker_group) is not None:
            worker_group.stop(how)

    # ------------------------------------------------------------------------------------------------------ inside

    def _what_happened(self, interrupted: bool, timeout: float | None) -> BaseException | None:
        if interrupted:
            text = f"the run was interrupted, and its workers have ended. All output: {self.folder}"
            return of_this_package(KeyboardInterrupt(text))
        if not self.done:
            text = f"The run has not ended after {timeout:g} s of waiting. It goes on; wait again, or stop it."
            return of_this_package(TimeoutError(text))
        return self._error

    def _outcome(self, error: BaseException | None) -> Any:
        __tracebackhide__ = True
        if error is not None:
            raise_as_it_is(error)
        return self.results if self._wanted == "all" else self.results[0]

    async def _awaited(self) -> Any:
        __tracebackhide__ = True
        self.follow()
        cancelled: asyncio.CancelledError | None = None
        while not self.done:
            try:
                # not one long wait: the kernel's interrupt does not wake a loop that sleeps (tornado's `add_callback`)
                await asyncio.sleep(_BETWEEN_REFRESHES)
            except asyncio.CancelledError as error:
                self.request_stop("interrupt" if cancelled is None else "kill")
                cancelled = error
        self._warn_of_trouble()
        return self._outcome(cancelled or self._error)

    def _show_until(self, deadline: float | None) -> bool:
        """Show the run until it is over or the time is; whether it was interrupted."""
        __tracebackhide__ = True
        interrupts = 0
        try:
            try:
                self._front_end.opened(self)
            except KeyboardInterrupt:
                interrupts += 1
                self.request_stop("interrupt")
            while not self._over.is_set() and (deadline is None or time.monotonic() < deadline):
                try:
                    self._over.wait(_BETWEEN_REFRESHES)
                    self._front_end.refresh()
                except KeyboardInterrupt:
                    interrupts += 1
                    self.request_stop("interrupt" if interrupts == 1 else "kill")
        finally:
            self._front_end.closed()
        return interrupts > 0

    def _conduct(self) -> None:
        try:
            self._keep_status("running")
            self._run_context.take(StateChange(None, "running", time.time(), self.why))
            with self._sampler:
                self._rank_results = self._worker_groups()
        except KeyboardInterrupt:
            # of a rank in this very process
            self._stopped = stronger(self._stopped, "interrupt")
            raise
        except Exception as error:  # noqa: BLE001 - raised where the run is waited for
            self._error = error
        finally:
            self._finish()

    def _worker_groups(self) -> tuple[RankResult, ...]:
        rank_results: tuple[RankResult, ...] = ()
        for number in range(self._max_restarts + 1):
            worker_group, rank_results = self._run_once(number)
            if worker_group.lost is not None and not worker_group.began:
                # what forks the workers died before the function had begun in any: nothing is done twice
                worker_group, rank_results = self._run_once(number)
            if all(rank_result.failure is None for rank_result in rank_results):
                break
            self._error = self._error_of(worker_group, rank_results)
            if self._stopped is not None or worker_group.timed_out is not None:
                break
        else:
            return rank_results
        if all(rank_result.failure is None for rank_result in rank_results):
            self._error = None
        return rank_results

    def _run_once(self, number: int) -> tuple[WorkerGroupLike, tuple[RankResult, ...]]:
        self._worker_group = worker_group = self._make_worker_group(number)
        if self._stopped is not None:
            worker_group.stop(self._stopped)
        return worker_group, worker_group.follow()

    def _error_of(self, worker_group: WorkerGroupLike, rank_results: tuple[RankResult, ...]) -> BaseException:
        if worker_group.timed_out is not None and self._timeout is not None:
            error = hang_error(self._timeout, self._snapshot_text(worker_group.timed_out), rank_results, self.folder)
            if error.hang is not None:
                self._run_context.take(error.hang)
            return error
        if worker_group.lost is not None:
            return LaunchError(f"The workers were lost: {worker_group.lost}. They were ended; launch again.")
        failures = [item.failure for item in rank_results if item.failure is not None]
        if self._stopped is not None and all(failure.ended_by_us for failure in failures):
            return stopped_error(worker_group.stopped_at, rank_results, self.folder)
        return worker_error(rank_results, self.folder)

    def _finish(self) -> None:
        state, detail = self._end_state()
        try:
            self._run_context.take(StateChange(None, state, time.time(), detail))
            self._keep_status(state, ended=self.view.ended)
            self._run_context.record.close()
            self._at_end(self._rank_results)
        finally:
            self._worker_group = None
            self._over.set()

    def _keep_status(self, state: State, ended: float | None = None) -> None:
        """Write the run's status into its folder, for readers later or elsewhere."""
        self._run_context.record.status(
            name=self.name,
            why=self.why,
            state=state,
            started=self.started,
            ended=ended,
            ranks=len(self.view.ranks),
            error=str(self._error) if self._error else None,
        )

    def _snapshot_text(self, snapshot: StackSnapshot) -> str:
        """A snapshot as text: the diagnosis, then every stack."""
        if not snapshot.replies:
            return ""
        sources = self._run_context.sources
        return f"{diagnosis(snapshot, sources)}\n\n{stacks_text(snapshot.replies, sources)}"

    def _end_state(self) -> tuple[State, str]:
        stopped_at = self._worker_group.stopped_at if self._worker_group is not None else None
        if stopped_at is not None and isinstance(self._error, (StoppedError, type(None))):
            return "stopped", f"as requested, {stopped_at}"
        if self._stopped is not None and (self._stopped != "finish" or isinstance(self._error, StoppedError)):
            return "stopped", "as requested"
        if self._error is None:
            return "finished", ""
        if isinstance(self._error, HangError):
            return "failed", f"it had not ended after timeout={self._timeout:g} s"
        lost = self._worker_group.lost if self._worker_group is not None else None
        return "failed", f"the workers were lost: {lost}" if lost else ""

    def _warn_of_trouble(self) -> None:
        trouble = self._run_context.record.trouble
        if trouble is not None:
            warn_user(f"Not all of the run is kept in {self.folder}: {trouble}", RuntimeWarning)


class InlineRun(Run):
    """A run of one rank in the very process that waits for it."""

    def start(self) -> Run:
        """Begin in this thread, and return when the run is over."""
        self._conduct()
        return self
