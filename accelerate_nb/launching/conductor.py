"""The conductor of a run in this process: attempts one after the other, restarts, the first cause of the end, and the results."""

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from accelerate_nb.config.environment import runs_folder
from accelerate_nb.config.run_config import RunConfig, differing
from accelerate_nb.errors import AccelerateNbError, HangError, LaunchError, NotYetError, StoppedError, WorkerError
from accelerate_nb.events.event_types import Event, ProfileRequested, Restart, State, StateChange, cause
from accelerate_nb.events.run_folder import RunRecorder, prune
from accelerate_nb.events.run_reader import tags_of
from accelerate_nb.events.run_state import RunState
from accelerate_nb.events.terminal_lines import plain_name
from accelerate_nb.failures.hang_report import snapshot_text
from accelerate_nb.failures.rank_result import RankResult
from accelerate_nb.failures.worker_error import failure_line, hang_error, hang_headline, stopped_error, worker_error
from accelerate_nb.launching.engines import supervisor
from accelerate_nb.launching.engines.children import Engine
from accelerate_nb.launching.engines.inline import InlineWorkers
from accelerate_nb.launching.group_runner import GroupRunner, Outcomes, RunContext
from accelerate_nb.launching.node_agent.agent import NodeAgent
from accelerate_nb.launching.planning.placement import LaunchPlan, NodeRoster, Placement
from accelerate_nb.launching.resource_monitor import monitor_resources
from accelerate_nb.launching.run import LaunchFacts
from accelerate_nb.launching.step_requests import KnobChanges, checked_ranks
from accelerate_nb.launching.worker_group import Stop, stronger
from accelerate_nb.reports.metric_curves import metric_facts
from accelerate_nb.sources.cells import CellSources
from accelerate_nb.transport.messages import ProfileSteps, RankMessage
from accelerate_nb.transport.payload import Payload
from accelerate_nb.transport.worker_spec import current_folder

# Errors that another attempt would meet again, by the names of their classes (a subclass is one, too), with the reason.
NEVER_HEALS: dict[str, str] = {
    "SyntaxError": "the code can't be read",
    "ImportError": "a module is missing",
    "NameError": "a name is missing",
    "NotImplementedError": "something is not implemented",
    "FileNotFoundError": "a file is missing",
    "NotADirectoryError": "a path is wrong",
    "IsADirectoryError": "a path is wrong",
    "PermissionError": "a permission is missing",
    "PayloadError": "something can't travel to another process",
    "ConfigurationError": "a setting is wrong",
    "KeyboardInterrupt": "it was interrupted",
}
# The pause doubles with each restart, up to so many seconds.
LONGEST_DELAY = 60.0
# How many attempts in a row may end before their first step: code for Accelerate's launcher counts on some.
MOST_EARLY = 5
# An attempt without a step, as of an evaluation, has got somewhere where it lasted so many seconds.
_LONG_ATTEMPT = 300.0


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch as the process knows it that conducts its run; `facts` are those of the call, for the run's status."""

    name: str
    config: RunConfig
    placement: Placement
    sources: CellSources
    folder: Path
    facts: Mapping[str, Any]


# One group of workers; a run has another after a restart.
AnyWorkerGroup: TypeAlias = GroupRunner | InlineWorkers


class Nodes:
    """The nodes of a run, of which the next attempt may have others; here all ranks are on this machine, in every attempt."""

    # their names and numbers of ranks; none where this machine is the only one
    roster = NodeRoster()
    # the name of the run
    run = ""

    @property
    def ranks_here(self) -> range | None:
        """The ranks on this machine; `None` for all."""
        return None

    @property
    def inherits_environment(self) -> bool:
        """Whether workers have their node's own environment, rather than that of this process."""
        return False

    @property
    def retries_at_once(self) -> bool:
        """Whether an attempt that was lost before it began is made once more, on as many nodes."""
        return True

    def placement_here(self, placement: Placement) -> Placement:
        """The part of a placement that is on this machine."""
        return placement

    def variables(self) -> dict[str, str]:
        """The variables that have collectives use the interface between the nodes."""
        return {}

    def check_payload(self, payload: Payload) -> None:
        """Raise `PayloadError` where it holds what can't leave this machine."""

    def handed_over(self) -> AbstractContextManager[tuple[Any, ...]]:
        """The machines for another process, which inherits their descriptors within the block; none where it reaches them by itself."""
        return nullcontext(())

    def worker_group(self, plan: LaunchPlan, engine: Engine, run_context: RunContext, number: int) -> GroupRunner:
        """The runner of one attempt; raises `LaunchError` where a node can't be reached."""
        return GroupRunner(plan, [partial(NodeAgent, engine)], run_context, number)

    def on_stop_elsewhere(self, request_stop: Callable[[Stop], None]) -> None:
        """Have this called where the end is requested on another node."""

    def next_nodes(self, lost: Collection[int], is_stopped: Callable[[], bool]) -> str:
        """Choose another attempt's nodes after a loss; what changes, in words; raises `LaunchError`."""
        # those of several machines wait for others, unless a stop was requested
        return ""

    def leave(self, reason: str) -> None:
        """Let the nodes go, since the run is over, for a reason in words."""


class Conductor:
    """Conducts a run in this process, in a thread of its own: attempts, restarts, the first cause, and the results."""

    # `on_event` gets every event but the lines of output, in the run's thread, once the view knows of it.

    def __init__(
        self,
        launch: Launch,
        worker_group: Callable[[RunContext, int], AnyWorkerGroup],
        nodes: Nodes,
        payload: Payload | None = None,
        on_event: Callable[[Event], None] = lambda _: None,
        outcomes: Callable[[RunState, RunRecorder], Outcomes] = lambda _view, _record: Outcomes(),
    ) -> None:
        self._launching, self._placement = launch.config.launching, launch.placement
        self._nodes, self._payload, self._on_event = nodes, payload, on_event
        self._status_facts = {"settings": differing(launch.config), **launch.facts}
        self.view, record = RunState(launch.placement.size), RunRecorder(launch.folder)
        timeout = self._launching.timeout
        self.run_context = RunContext(
            view=self.view,
            record=record,
            sources=launch.sources,
            deadline=None if timeout is None else time.monotonic() + timeout,
            stop_grace_period=self._launching.stop_grace_period,
            hang_warning_after=self._launching.hang_warning_after,
            on_event=self._on_run_event,
            outcomes=outcomes(self.view, record),
        )
        self.facts = LaunchFacts(
            name=plain_name(launch.name),
            why=launch.placement.why,
            folder=launch.folder,
            started=time.time(),
            results=self._launching.results,
            stop_grace_period=self._launching.stop_grace_period,
            tags=tags_of(self._status_facts),
            function=self._status_facts.get("function", ""),
            arguments=self._status_facts.get("arguments"),
        )
        self.over = threading.Event()
        self.rank_results: tuple[RankResult, ...] = ()
        self.error: BaseException | None = None
        # the point at which all ranks stopped on request, once the run is over
        self.stopped_at: str | None = None
        # whether its function is called by `start`, in that thread
        self._is_inline = launch.placement.start == "inline"
        self._make_worker_group = worker_group
        self._worker_group: AnyWorkerGroup | None = None
        self._stopped: Stop | None = None
        self._stop_requested = threading.Event()
        self._why_given_up = ""
        self._thread: threading.Thread | None = None
        # reentrant: who is called with an event may request a stop
        self._status_lock = threading.RLock()
        self._is_finishing = False
        self._knobs = KnobChanges(self.view, self.send)
        self._profile_lock, self._profile_count = threading.Lock(), 0
        nodes.on_stop_elsewhere(self.request_stop)

    @property
    def is_going_on(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def trouble(self) -> OSError | None:
        return self.run_context.record.trouble

    @property
    def ranks_here(self) -> range:
        """The ranks on this machine, whose process numbers mean something here."""
        return range(len(self.view.ranks)) if self._nodes.ranks_here is None else self._nodes.ranks_here

    @property
    def main_rank(self) -> int:
        return min(self._nodes.ranks_here or (0,))

    def log_file(self, rank: int) -> Path:
        """The file that holds all that a rank wrote so far; there is none where it wrote nothing."""
        self.run_context.record.flush()
        return self.facts.folder / f"rank_{rank}.log"

    def stacks(self) -> str:
        if (worker_group := self._worker_group) is None or self.over.is_set():
            return ""
        return snapshot_text(worker_group.snapshot(), self.run_context.sources)

    def start(self) -> None:
        """Begin, in a thread of the run's own; a run of this very process is over when this returns."""
        if self._is_inline:
            self._conduct()
            return
        self._thread = threading.Thread(target=self._conduct, name="accelerate_nb run", daemon=True)
        self._thread.start()

    def request_stop(self, how: Stop) -> None:
        with self._status_lock:
            # the last event stays the last
            if self._is_finishing:
                return
            if self._stopped is None:
                self.run_context.take(StateChange(None, "stopping", time.time(), "as requested"))
            self._stopped = stronger(self._stopped, how)
        self._stop_requested.set()
        if (worker_group := self._worker_group) is not None:
            worker_group.stop(how)

    def set_knob(self, name: str, value: float) -> None:
        self._knobs.request(name, value)

    def profile(self, steps: int = 10, ranks: Iterable[int] | None = None) -> None:
        if self._is_inline:
            raise NotYetError(
                "A profile was requested of a function that runs in this process. Use torch.profiler or `accelerator.profile()` in it, or "
                "launch workers."
            )
        with self._profile_lock:
            chosen = checked_ranks(self.view, steps, ranks)
            self._profile_count = number = self._profile_count + 1
            for rank in chosen:
                self.run_context.take(ProfileRequested(rank, number, steps, time.time()))
        for rank in chosen:
            self.send(rank, ProfileSteps(rank, number, steps, str(self.facts.folder)))

    def send(self, rank: int, message: RankMessage, descriptors: Sequence[int] = ()) -> None:
        if (worker_group := self._worker_group) is not None:
            worker_group.send(rank, message, descriptors)

    def task_reply(self, rank: int, task: int) -> int:
        """In `on_event`: the file of a rank's reply to a session's task, which has ended; it is the caller's to close."""
        assert self._worker_group is not None
        return self._worker_group.task_reply(rank, task)

    def restart_watchdog(self, timeout: float) -> None:
        """Restart the idle watchdog, since workers got a new task; it warns after so many seconds, with 0 never."""
        if (worker_group := self._worker_group) is not None:
            worker_group.restart_watchdog(timeout)

    def _on_run_event(self, event: Event) -> None:
        self._knobs.take(event)
        self._on_event(event)

    def _conduct(self) -> None:
        try:
            self._keep_status("running")
            self._take_nodes()
            self.run_context.take(StateChange(None, "running", time.time(), self.facts.why))
            kind, environment = self._placement.kind, {**os.environ, **self._placement.shows}
            with monitor_resources(
                self.view, lambda: self.ranks_here, kind, environment, [self.facts.folder, Path(current_folder())]
            ):
                self.rank_results = self._worker_groups()
        except KeyboardInterrupt:
            # of a rank in this very process
            self._stopped = stronger(self._stopped, "interrupt")
            raise
        except Exception as error:  # noqa: BLE001 - raised where the run is waited for
            self.error = error
        finally:
            self._finish()

    def _worker_groups(self) -> tuple[RankResult, ...]:
        attempts: list[FailedAttempt] = []
        while True:
            began, number = time.monotonic(), len(attempts)
            worker_group, rank_results = self._run_once(number)
            if worker_group.group.lost is not None and not worker_group.group.begun and self._nodes.retries_at_once:
                # what forks the workers died before the function had begun in any: nothing is done twice
                if self._next_nodes(worker_group):
                    self._take_nodes()
                worker_group, rank_results = self._run_once(number)
            group = worker_group.group
            if all(rank_result.failure is None for rank_result in rank_results):
                return rank_results
            error = self._error_of(worker_group, rank_results)
            first = cause([item.failure for item in rank_results if item.failure is not None])
            bases = () if (raised := rank_results[first.rank].error) is None else type(raised).__mro__
            attempt = FailedAttempt(
                reason=f"the workers were lost: {group.lost}" if group.lost else failure_line(first),
                exceptions=tuple(dict.fromkeys([first.type, *(base.__name__ for base in bases)])),
                has_stepped=self.view.has_stepped,
                seconds=time.monotonic() - began,
                was_stopped=self._stopped is not None,
                timed_out=worker_group.timed_out is not None,
            )
            attempts.append(attempt)
            delay, why_given_up = decide(attempts, self._launching.max_restarts, self._launching.restart_delay)
            changed = ""
            if delay is not None:
                try:
                    changed = self._next_nodes(worker_group)
                except LaunchError as reason:
                    delay, why_given_up = None, str(reason)
            if delay is None:
                self.error, self._why_given_up = with_attempts(error, attempts, why_given_up), why_given_up
                return rank_results
            texts = (changed,) if changed and group.lost_ranks else (attempt.reason, changed)
            next_size = sum(self._nodes.roster.sizes) or len(rank_results)
            restart = Restart(
                attempt=number + 1,
                max_restarts=self._launching.max_restarts,
                reason="; ".join(filter(None, texts)),
                delay=delay,
                time=time.time(),
                ranks=None if next_size == len(rank_results) else next_size,
            )
            self.run_context.record.put_logs_aside(number)
            self.run_context.take(restart)
            self._take_nodes()
            self._keep_status("running")
            left = (self.run_context.deadline or float("inf")) - time.monotonic()
            if self._stop_requested.wait(min(restart.delay, max(0.0, left))):
                self.error = stopped_error(None, rank_results, self.facts.folder)
                return rank_results

    def _next_nodes(self, worker_group: AnyWorkerGroup) -> str:
        """Choose the nodes of another attempt; returns a sentence, empty where nothing changes, and raises `LaunchError` with the reason."""
        if self._launching.max_restarts == 0:
            return ""
        return self._nodes.next_nodes(worker_group.group.lost_ranks, self._stop_requested.is_set)

    def _take_nodes(self) -> None:
        for node in self._nodes.roster.node_ranks:
            self.run_context.take(node)

    def _run_once(self, number: int) -> tuple[AnyWorkerGroup, tuple[RankResult, ...]]:
        self._worker_group = worker_group = self._make_worker_group(self.run_context, number)
        if self._stopped is not None:
            worker_group.stop(self._stopped)
        return worker_group, worker_group.follow()

    def _error_of(self, worker_group: AnyWorkerGroup, rank_results: tuple[RankResult, ...]) -> BaseException:
        if worker_group.timed_out is not None:
            is_late = time.monotonic() > (self.run_context.deadline or float("inf"))
            snapshot = snapshot_text(worker_group.timed_out, self.run_context.sources)
            error = hang_error(self._launching.timeout if is_late else None, snapshot, rank_results, self.facts.folder)
            if error.hang is not None:
                self.run_context.take(error.hang)
            return error
        if worker_group.group.lost is not None:
            return LaunchError(f"The workers were lost: {worker_group.group.lost}. They were ended; launch again.")
        failures = [item.failure for item in rank_results if item.failure is not None]
        if self._stopped is not None and all(failure.ended_by_us for failure in failures):
            return stopped_error(worker_group.group.stopped_at, rank_results, self.facts.folder)
        return worker_error(rank_results, self.facts.folder)

    def update_status(self) -> None:
        with self._status_lock:
            # the last status stays the last
            if not self._is_finishing:
                self._keep_status(self.view.state)

    def finish_again(self) -> bool:
        """Write the outcome and the last status once more; whether both could be written."""
        self.run_context.record.trouble = None
        if not self.run_context.outcomes.save(self.error):
            return False
        self._keep_status(self.view.state, ended=self.view.ended)
        return self.trouble is None

    def _finish(self) -> None:
        # the outcome first: who sees the end of the run reads it
        self.run_context.outcomes.save(self.error)
        with self._status_lock:
            self._is_finishing = True
        state, detail = self._end_state()
        try:
            self.run_context.take(StateChange(None, state, time.time(), detail))
            self._keep_status(state, ended=self.view.ended)
            self.run_context.record.close()
            why = "" if self.error is None else repr(self.error)
            if isinstance(self.error, AccelerateNbError):
                why = str(self.error).partition("\n")[0]
            self._nodes.leave(detail or why or f"its run has {state}")
            if self._payload is not None:
                self._payload.close()
            if self.facts.folder.parent == runs_folder(os.environ):
                prune(self.facts.folder.parent)
            supervisor.preload(module for rank_result in self.rank_results for module in rank_result.modules)
        finally:
            self._worker_group = None
            self.over.set()

    def rename(self, name: str | None, tags: str) -> None:
        """Give the run another name, unless that is `None`, and other tags, while it goes on."""
        given = {"tags": tags} if name is None else {"name": name, "tags": tags}
        self._status_facts["settings"] = {**self._status_facts.get("settings", {}), **given}
        self.facts = replace(self.facts, name=name or self.facts.name, tags=tags_of(self._status_facts))
        self._keep_status(self.view.state)

    def _keep_status(self, state: State, ended: float | None = None) -> None:
        metrics = {} if ended is None else metric_facts([self.view.rank(rank) for rank in self.view.ranks])
        self.run_context.record.status(
            name=self.facts.name,
            why=self.facts.why,
            state=state,
            started=self.facts.started,
            ended=ended,
            ranks=len(self.view.ranks),
            error=str(self.error) if self.error else None,
            restarts=self.view.restarts[-1].attempt if self.view.restarts else 0,
            main_rank=self.main_rank,
            **{**self._status_facts, **self.run_context.outcomes.facts(), **metrics},
        )

    def _end_state(self) -> tuple[State, str]:
        group = self._worker_group.group if self._worker_group is not None else None
        stopped_at = None if group is None else group.stopped_at
        if stopped_at is not None and isinstance(self.error, (StoppedError, type(None))):
            self.stopped_at = stopped_at
            return "stopped", f"as requested, {stopped_at}"
        if self._stopped is not None and (self._stopped != "finish" or isinstance(self.error, StoppedError)):
            return "stopped", "as requested"
        if self.error is None:
            return "finished", ""
        if isinstance(self.error, HangError) and self.error.hang is not None:
            return "failed", hang_headline(self.error.hang)
        if self._why_given_up:
            return "failed", f"not started again: {self._why_given_up}"
        return "failed", f"the workers were lost: {group.lost}" if group is not None and group.lost else ""


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """A failed attempt of a run: its first cause in one line, and the names of that one's class and bases."""

    reason: str
    exceptions: tuple[str, ...] = ()
    has_stepped: bool = False
    seconds: float = 0.0
    was_stopped: bool = False
    timed_out: bool = False


def decide(attempts: Sequence[FailedAttempt], max_restarts: int, restart_delay: float) -> tuple[float | None, str]:
    """The seconds until all ranks start again after the last of these; or `None` with a reason, empty where nobody expects one."""
    last = attempts[-1]
    if last.was_stopped or last.timed_out or max_restarts == 0:
        return None, ""
    if (name := next((name for name in last.exceptions if name in NEVER_HEALS), None)) is not None:
        return None, f"a restart does not heal a {last.exceptions[0]}: {NEVER_HEALS[name]}"
    if len(attempts) > max_restarts:
        return None, f"max_restarts={max_restarts} is used up"
    got_somewhere = (attempt.has_stepped or attempt.seconds >= _LONG_ATTEMPT for attempt in attempts[-MOST_EARLY:])
    if len(attempts) >= MOST_EARLY and not any(got_somewhere):
        return None, f"{MOST_EARLY} attempts in a row ended before their first optimizer step"
    return min(restart_delay * 2.0 ** min(len(attempts) - 1, 60), LONGEST_DELAY), ""


def with_attempts(error: BaseException, attempts: Sequence[FailedAttempt], why_given_up: str) -> BaseException:
    """The error of a run with a paragraph on why it was not started again, with every attempt, where there is a reason."""
    if not why_given_up:
        return error
    lines = [f"attempt {number} ({attempt.seconds:.1f} s): {attempt.reason}" for number, attempt in enumerate(attempts)]
    text = "\n".join([f"It was not started again: {why_given_up}.", *(lines if len(lines) > 1 else ())])
    if not isinstance(error, WorkerError):
        return LaunchError(f"{error}\n\n{text}")
    # the worker's class may be a frozen dataclass, which refuses plain assignment
    object.__setattr__(error, "message", f"{error.message}\n\n{text}")
    return error
