"""A run: what a launch gives back, to wait for, to read and to stop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol

from accelerate_nb.errors import LaunchError, StoppedError, of_this_package
from accelerate_nb.events.model import State, StateChange
from accelerate_nb.events.readable import Readable
from accelerate_nb.events.view import RunView
from accelerate_nb.launching.attempt import Scene, Stop, stronger
from accelerate_nb.launching.blame import hang_error, stopped_error, worker_error
from accelerate_nb.launching.diagnosis import Look, diagnosis
from accelerate_nb.launching.ending import Ending
from accelerate_nb.launching.sampling import Sampler
from accelerate_nb.launching.sources import Sources
from accelerate_nb.launching.stacks import stacks_text
from accelerate_nb.notices import notice

# How often the front end may draw while somebody waits.
_BETWEEN_REFRESHES = 0.1


class Watched(Readable, Protocol):
    """What a front end may know of a run, and ask of it."""

    @property
    def done(self) -> bool:
        """Whether every worker has ended."""

    def ask(self, how: Stop) -> None:
        """
        Ask for the end, from any thread, without waiting for it.

        "finish" lets every rank end after the same step, "interrupt" interrupts them where they are, "kill" just ends them.
        """

    def stacks(self) -> str:
        """Where every rank that still runs is now; takes up to some seconds."""

    def log_file(self, rank: int) -> Path:
        """The file that holds all that a rank wrote so far; there is none where it wrote nothing."""


class FrontEnd(Protocol):
    """What shows a run to a person; it reads the view and holds nothing of the run."""

    def opened(self, run: Watched) -> None:
        """Somebody waits for the run from now on, in the cell that runs at this moment."""

    def refresh(self) -> None:
        """Draw what is new; called some times a second from the waiting thread."""

    def closed(self) -> None:
        """Nobody waits any more: draw the last."""

    def follow(self, run: Watched) -> None:
        """Show the run in the cell that runs at this moment, and go on by oneself until it is over; returns at once."""

    def show(self, run: Watched) -> None:
        """Show the run in the cell that runs at this moment as well, during the run or after it; returns at once."""


class Attempting(Protocol):
    """One try at running a group of workers."""

    began: bool
    timed_out: Look | None
    lost: str | None

    @property
    def last_step(self) -> int | None:
        """The step after which ranks stopped because they were asked to."""

    def follow(self) -> tuple[Ending, ...]:
        """Run to the end."""

    def stop(self, how: Stop) -> None:
        """Ask for the end, from any thread."""

    def tell(self, rank: int, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> bool:
        """Send a message to a worker's inbox; whether there was somebody to take it."""

    def listen_anew(self, patience: float) -> None:
        """A silence begins anew, and is told of after so many seconds."""

    def look(self) -> Look:
        """Where every rank is now."""


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
        scene: Scene,
        attempt: Callable[[int], Attempting],
        max_restarts: int,
        timeout: float | None,
        results: Literal["main", "all"],
        front_end: FrontEnd,
        name: str,
        why: str,
        at_end: Callable[[tuple[Ending, ...]], None],
        sampler: Sampler,
    ) -> None:
        self.name, self.why = name, why
        self.started = time.time()
        self._scene, self._make_attempt, self._max_restarts = scene, attempt, max_restarts
        self._timeout, self._wanted, self._front_end = timeout, results, front_end
        self._at_end, self._sampler = at_end, sampler
        self._attempt: Attempting | None = None
        self._stopped: Stop | None = None
        self._endings: tuple[Ending, ...] = ()
        self._error: BaseException | None = None
        self._over = threading.Event()
        self._is_followed = False
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------------------------------------------ reading

    @property
    def view(self) -> RunView:
        """Everything that has happened so far."""
        return self._scene.view

    @property
    def folder(self) -> Path:
        """Where every rank's output, the metrics and the events are kept."""
        return self._scene.record.folder

    @property
    def done(self) -> bool:
        """Whether every worker has ended."""
        return self._over.is_set()

    @property
    def error(self) -> BaseException | None:
        """What `wait` raises once the run is done, where it is not the interrupt of a wait; `None` where all is well."""
        return self._error

    @property
    def results(self) -> list[Any]:
        """What each rank's function returned, in the order of ranks; `None` for one that failed; empty while it runs."""
        return [ending.value for ending in self._endings]

    def log_file(self, rank: int) -> Path:
        """The file that holds all that a rank wrote so far; there is none where it wrote nothing."""
        self._scene.record.flush()
        return self.folder / f"rank_{rank}.log"

    def logs(self, rank: int) -> str:
        """All that a rank wrote; undecodable bytes are shown as escapes."""
        path = self.log_file(rank)
        return path.read_bytes().decode(errors="backslashreplace") if path.exists() else ""

    def tell(self, rank: int, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> bool:
        """Send a message to a worker's inbox; whether there was somebody to take it."""
        attempt = self._attempt
        return attempt is not None and attempt.tell(rank, message, descriptors)

    def listen_anew(self, patience: float) -> None:
        """Workers were asked for something else: a silence begins anew, and is told of after so many seconds; 0: never."""
        if (attempt := self._attempt) is not None:
            attempt.listen_anew(patience)

    def learn(self, sources: Sources) -> None:
        """More cells that stacks may name."""
        known = self._scene.sources
        self._scene.sources = Sources({**known.lines, **sources.lines}, {**known.numbers, **sources.numbers})

    def stacks(self) -> str:
        """Where every rank that still runs is now: which wait for which, then every stack with the notebook's own lines."""
        attempt = self._attempt
        return "" if attempt is None or self.done else self._told(attempt.look())

    def __repr__(self) -> str:
        ranks = len(self.view.ranks)
        return (
            f"<Run of {self.name}: {self.view.state}, {ranks} rank{'' if ranks == 1 else 's'}, output in {self.folder}>"
        )

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

        Ranks that make no steps with an `Accelerator`, or don't come to the end of one within the grace, are interrupted,
        and killed where they don't end within the grace after that; so are all after `timeout` seconds.
        """
        self.ask("finish")
        if self._thread is None or not self._thread.is_alive():
            return
        if not self._over.wait(timeout):
            self.ask("interrupt")
            self._over.wait(self._scene.grace + 5)

    def ask(self, how: Stop) -> None:
        """Ask for the end, from any thread, without waiting for it: "finish", "interrupt" or "kill", as `Watched` says."""
        if self.done:
            return
        if self._stopped is None:
            self._scene.take(StateChange(None, "stopping", time.time(), "as was asked"))
        self._stopped = stronger(self._stopped, how)
        if (attempt := self._attempt) is not None:
            attempt.stop(how)

    # ------------------------------------------------------------------------------------------------------ inside

    def _what_happened(self, interrupted: bool, timeout: float | None) -> BaseException | None:
        if interrupted:
            return of_this_package(
                KeyboardInterrupt(f"the run was interrupted, and its workers have ended. All output: {self.folder}")
            )
        if not self.done:
            return of_this_package(
                TimeoutError(
                    f"The run has not ended after {timeout:g} s of waiting. It goes on; wait again, or stop it."
                )
            )
        return self._error

    def _outcome(self, error: BaseException | None) -> Any:
        __tracebackhide__ = True
        if error is not None:
            _raise(error)
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
                self.ask("interrupt" if cancelled is None else "kill")
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
                self.ask("interrupt")
            while not self._over.is_set() and (deadline is None or time.monotonic() < deadline):
                try:
                    self._over.wait(_BETWEEN_REFRESHES)
                    self._front_end.refresh()
                except KeyboardInterrupt:
                    interrupts += 1
                    self.ask("interrupt" if interrupts == 1 else "kill")
        finally:
            self._front_end.closed()
        return interrupts > 0

    def _conduct(self) -> None:
        try:
            self._keep_status("running")
            self._scene.take(StateChange(None, "running", time.time(), self.why))
            with self._sampler:
                self._endings = self._attempts()
        except KeyboardInterrupt:
            # of a rank in this very process
            self._stopped = stronger(self._stopped, "interrupt")
            raise
        except Exception as error:  # noqa: BLE001 - raised where the run is waited for
            self._error = error
        finally:
            self._finish()

    def _attempts(self) -> tuple[Ending, ...]:
        endings: tuple[Ending, ...] = ()
        for number in range(self._max_restarts + 1):
            attempt, endings = self._tried(number)
            if attempt.lost is not None and not attempt.began:
                # what forks the workers died before the function had begun in any: nothing is done twice
                attempt, endings = self._tried(number)
            if all(ending.failure is None for ending in endings):
                break
            self._error = self._error_of(attempt, endings)
            if self._stopped is not None or attempt.timed_out is not None:
                break
        else:
            return endings
        if all(ending.failure is None for ending in endings):
            self._error = None
        return endings

    def _tried(self, number: int) -> tuple[Attempting, tuple[Ending, ...]]:
        self._attempt = attempt = self._make_attempt(number)
        if self._stopped is not None:
            attempt.stop(self._stopped)
        return attempt, attempt.follow()

    def _error_of(self, attempt: Attempting, endings: tuple[Ending, ...]) -> BaseException:
        if attempt.timed_out is not None and self._timeout is not None:
            return hang_error(self._timeout, self._told(attempt.timed_out), endings, self.folder)
        if attempt.lost is not None:
            return LaunchError(f"The workers were lost: {attempt.lost}. They were ended; launch again.")
        if self._stopped is not None and all(
            ending.failure is None or ending.failure.ended_by_us for ending in endings
        ):
            return stopped_error(attempt.last_step, endings, self.folder)
        return worker_error(endings, self.folder)

    def _finish(self) -> None:
        state, detail = self._end_state()
        try:
            self._scene.take(StateChange(None, state, time.time(), detail))
            self._keep_status(state, ended=self.view.ended)
            self._scene.record.close()
            self._at_end(self._endings)
        finally:
            self._attempt = None
            self._over.set()

    def _keep_status(self, state: State, ended: float | None = None) -> None:
        """Say in the run's folder how it stands, for whoever looks at it later or from elsewhere."""
        self._scene.record.status(
            name=self.name,
            why=self.why,
            state=state,
            started=self.started,
            ended=ended,
            ranks=len(self.view.ranks),
            error=str(self._error) if self._error else None,
        )

    def _told(self, look: Look) -> str:
        """What a look at all ranks says in short, and every stack."""
        if not look.answers:
            return ""
        sources = self._scene.sources
        return f"{diagnosis(look, sources)}\n\n{stacks_text(look.answers, sources)}"

    def _end_state(self) -> tuple[State, str]:
        last_step = self._attempt.last_step if self._attempt is not None else None
        if last_step is not None and isinstance(self._error, (StoppedError, type(None))):
            return "stopped", f"as was asked, after step {last_step}"
        if self._stopped is not None and (self._stopped != "finish" or isinstance(self._error, StoppedError)):
            return "stopped", "as was asked"
        if self._error is None:
            return "finished", ""
        lost = self._attempt.lost if self._attempt is not None else None
        return "failed", f"the workers were lost: {lost}" if lost else ""

    def _warn_of_trouble(self) -> None:
        trouble = self._scene.record.trouble
        if trouble is not None:
            notice(f"Not all of the run is kept in {self.folder}: {trouble}", RuntimeWarning)


class RunHere(Run):
    """A run of one rank in the very process that waits for it."""

    def start(self) -> Run:
        """Begin in this thread, and come back when the run is over."""
        self._conduct()
        return self


def _raise(error: BaseException) -> NoReturn:
    """Raise what became of the workers, in the process that waits for them."""
    raise error
