"""A run that this process launched: its worker groups, one after the other, in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from accelerate_nb.errors import AccelerateNbError, HangError, LaunchError, NotYetError, StoppedError, WorkerError
from accelerate_nb.events.model import (
    Event,
    Restart,
    State,
    StateChange,
    cause,
)
from accelerate_nb.events.run_reader import tags_of
from accelerate_nb.failures.hang_report import snapshot_text
from accelerate_nb.failures.rank_result import RankResult
from accelerate_nb.failures.worker_error import hang_error, hang_reason, stopped_error, worker_error
from accelerate_nb.launching.front_end import FrontEnd
from accelerate_nb.launching.resource_monitor import ResourceMonitor
from accelerate_nb.launching.restart_policy import ChangingNodes, FailedAttempt, GiveUp, StartAgain, decide, explanation
from accelerate_nb.launching.run import Run
from accelerate_nb.launching.run_context import RunContext, Stop, WorkerGroupLike, stronger
from accelerate_nb.launching.step_requests import KnobChanges, ProfileRequests
from accelerate_nb.reports.failure_summary import failure_line
from accelerate_nb.reports.metric_curves import metric_facts
from accelerate_nb.sources.cells import CellSources
from accelerate_nb.transport.messages import Message


class LaunchedRun(Run):
    """A run whose worker groups this process starts and follows; the launcher makes it."""

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
        restart_delay: float = 0.0,
        changing_nodes: ChangingNodes | None = None,
        facts: Mapping[str, Any] | None = None,
        is_inline: bool = False,
    ) -> None:
        super().__init__(
            name=name,
            why=why,
            folder=run_context.record.folder,
            view=run_context.view,
            results=results,
            front_end=front_end,
            stop_grace_period=run_context.stop_grace_period,
        )
        self._run_context, self._make_worker_group = run_context, worker_group
        self._max_restarts, self._restart_delay = max_restarts, restart_delay
        self._timeout, self._at_end, self._sampler = timeout, at_end, sampler
        self._changing_nodes, self._facts = changing_nodes, dict(facts or {})
        # whether its function is called by `start`, in that thread
        self._is_inline = is_inline
        self.tags = tags_of(self._facts)
        self.function, self.arguments = self._facts.get("function", ""), self._facts.get("arguments")
        self._worker_group: WorkerGroupLike | None = None
        self._stopped: Stop | None = None
        self._stop_requested = threading.Event()
        self._why_given_up = ""
        # the point at which all ranks stopped on request, once the run is over
        self.stopped_at: str | None = None
        # the ranks on this machine, whose process numbers mean something here; `None` for all
        self.ranks_here: Collection[int] | None = None
        self._thread: threading.Thread | None = None
        self._status_lock = threading.Lock()
        self._is_finishing = False
        self._knobs = KnobChanges(run_context.view, self.send)
        self._profiles = ProfileRequests(run_context.view, self.folder, self.send, run_context.take)
        self._on_event, run_context.on_event = run_context.on_event, self._on_run_event

    # ------------------------------------------------------------------------------------------------------ reading

    def log_file(self, rank: int) -> Path:
        """The file that holds all that a rank wrote so far; there is none where it wrote nothing."""
        self._run_context.record.flush()
        return super().log_file(rank)

    def stacks(self) -> str:
        """The position of every rank that still runs: which wait for which, then every stack with the notebook's own lines."""
        worker_group = self._worker_group
        return (
            ""
            if worker_group is None or self.done
            else snapshot_text(worker_group.snapshot(), self._run_context.sources)
        )

    # ------------------------------------------------------------------------------------------------------- acting

    def start(self) -> LaunchedRun:
        """Begin, in a thread of the run's own; a run of this very process is over when this returns."""
        if self._is_inline:
            self._conduct()
            return self
        self._thread = threading.Thread(target=self._conduct, name="accelerate_nb run", daemon=True)
        self._thread.start()
        return self

    def request_stop(self, how: Stop) -> None:
        """Request the end, from any thread, without waiting for it: "finish", "interrupt" or "kill" (see `RunHandle`)."""
        if self.done:
            return
        if self._stopped is None:
            self._run_context.take(StateChange(None, "stopping", time.time(), "as requested"))
        self._stopped = stronger(self._stopped, how)
        self._stop_requested.set()
        if (worker_group := self._worker_group) is not None:
            worker_group.stop(how)

    def set_knob(self, name: str, value: float) -> None:
        """Change a knob on all ranks after the same optimizer step, from any thread, without waiting for it."""
        self._knobs.request(name, value)

    def profile(self, steps: int = 10, ranks: Iterable[int] | None = None) -> None:
        """Have ranks profile their next optimizer steps, from any thread, without waiting for it."""
        if self._is_inline:
            raise NotYetError(
                "A profile was requested of a function that runs in this process. Use torch.profiler or `accelerator.profile()` in it, or "
                "launch workers."
            )
        self._profiles.request(steps, ranks)

    def send(self, rank: int, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message to a worker's inbox, where the worker is there."""
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

    def serve_tasks(self, returned: Callable[[], Collection[int]], end_deadlock: Callable[[str], bool]) -> None:
        """Have a session's tasks ended, with the ranks' positions, where ranks wait for those that have returned from one."""
        self._run_context.returned_from_task = returned
        self._run_context.end_task = lambda found: end_deadlock(snapshot_text(found, self._run_context.sources))

    def add_sources(self, sources: CellSources) -> None:
        """Add cells that stacks may name."""
        known = self._run_context.sources
        self._run_context.sources = CellSources({**known.lines, **sources.lines}, {**known.numbers, **sources.numbers})

    # ------------------------------------------------------------------------------------------------------ inside

    def _is_going_on(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _on_run_event(self, event: Event) -> None:
        self._knobs.take(event)
        self._on_event(event)

    def _trouble(self) -> object | None:
        return self._run_context.record.trouble

    def _conduct(self) -> None:
        try:
            self._keep_status("running")
            self._take_nodes()
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
        attempts: list[FailedAttempt] = []
        while True:
            began, number = time.monotonic(), len(attempts)
            worker_group, rank_results = self._run_once(number)
            retries = self._changing_nodes is None or self._changing_nodes.retries_at_once
            if worker_group.lost is not None and not worker_group.began and retries:
                # what forks the workers died before the function had begun in any: nothing is done twice
                if self._next_nodes(worker_group):
                    self._take_nodes()
                worker_group, rank_results = self._run_once(number)
            if all(rank_result.failure is None for rank_result in rank_results):
                return rank_results
            error = self._error_of(worker_group, rank_results)
            attempts.append(self._failed_attempt(worker_group, rank_results, time.monotonic() - began))
            decision = decide(attempts, self._max_restarts, self._restart_delay)
            changed = ""
            if isinstance(decision, StartAgain):
                try:
                    changed = self._next_nodes(worker_group)
                except LaunchError as reason:
                    decision = GiveUp(str(reason))
            if isinstance(decision, GiveUp):
                self._error, self._why_given_up = _explained(error, explanation(attempts, decision)), decision.reason
                return rank_results
            texts = (changed,) if changed and worker_group.lost_ranks else (attempts[-1].reason, changed)
            restart = Restart(
                attempt=number + 1,
                max_restarts=self._max_restarts,
                reason="; ".join(filter(None, texts)),
                delay=decision.delay,
                time=time.time(),
                ranks=self._next_size(len(rank_results)),
            )
            if self._stops_before_restart(restart):
                self._error = stopped_error(None, rank_results, self.folder)
                return rank_results

    def _next_nodes(self, worker_group: WorkerGroupLike) -> str:
        """Choose the nodes of another attempt; returns a sentence, empty where nothing changes, and raises `LaunchError` with the reason."""
        if self._changing_nodes is None or self._max_restarts == 0:
            return ""
        return self._changing_nodes.next_nodes(worker_group.lost_ranks, self._stop_requested.is_set)

    def _take_nodes(self) -> None:
        """Know the ranks of each node, and those of this one."""
        for node in () if self._changing_nodes is None else self._changing_nodes.node_ranks:
            self._run_context.take(node)
        self.ranks_here = None if self._changing_nodes is None else self._changing_nodes.ranks_here
        self.main_rank = min(self.ranks_here or (0,))

    def _next_size(self, size: int) -> int | None:
        """The number of ranks of the next attempt, where it is another one than that of the last."""
        nodes = () if self._changing_nodes is None else self._changing_nodes.node_ranks
        next_size = max((node.last + 1 for node in nodes), default=size)
        return None if next_size == size else next_size

    def _failed_attempt(
        self, worker_group: WorkerGroupLike, rank_results: Sequence[RankResult], seconds: float
    ) -> FailedAttempt:
        first = cause([item.failure for item in rank_results if item.failure is not None])
        error = rank_results[first.rank].error
        bases = [base.__name__ for base in type(error).__mro__] if error is not None else []
        return FailedAttempt(
            reason=f"the workers were lost: {worker_group.lost}" if worker_group.lost else failure_line(first),
            exceptions=tuple(dict.fromkeys([first.type, *bases])),
            has_stepped=self.view.has_stepped,
            seconds=seconds,
            was_stopped=self._stopped is not None,
            timed_out=worker_group.timed_out is not None,
        )

    def _stops_before_restart(self, restart: Restart) -> bool:
        """Announce another attempt, and wait through its pause; whether a stop was requested meanwhile."""
        self._run_context.record.put_logs_aside(restart.attempt - 1)
        self._run_context.take(restart)
        self._take_nodes()
        self._keep_status("running")
        left = (self._run_context.deadline or float("inf")) - time.monotonic()
        return self._stop_requested.wait(min(restart.delay, max(0.0, left)))

    def _run_once(self, number: int) -> tuple[WorkerGroupLike, tuple[RankResult, ...]]:
        self._worker_group = worker_group = self._make_worker_group(number)
        if self._stopped is not None:
            worker_group.stop(self._stopped)
        return worker_group, worker_group.follow()

    def _error_of(self, worker_group: WorkerGroupLike, rank_results: tuple[RankResult, ...]) -> BaseException:
        if worker_group.timed_out is not None:
            is_late = time.monotonic() > (self._run_context.deadline or float("inf"))
            snapshot = snapshot_text(worker_group.timed_out, self._run_context.sources)
            error = hang_error(self._timeout if is_late else None, snapshot, rank_results, self.folder)
            if error.hang is not None:
                self._run_context.take(error.hang)
            return error
        if worker_group.lost is not None:
            return LaunchError(f"The workers were lost: {worker_group.lost}. They were ended; launch again.")
        failures = [item.failure for item in rank_results if item.failure is not None]
        if self._stopped is not None and all(failure.ended_by_us for failure in failures):
            return stopped_error(worker_group.stopped_at, rank_results, self.folder)
        return worker_error(rank_results, self.folder)

    def update_status(self) -> None:
        """Bring the run's status in its folder up to date."""
        with self._status_lock:
            # the last status stays the last
            if not self._is_finishing:
                self._keep_status(self.view.state)

    @property
    def is_kept(self) -> bool:
        """Whether all of the run could be written into its folder."""
        return self._run_context.record.trouble is None

    def finish_again(self) -> bool:
        """Write the outcome and the last status once more; whether both could be written."""
        self._run_context.record.trouble = None
        if not self._run_context.outcomes.save(self._error):
            return False
        self._keep_status(self.view.state, ended=self.view.ended)
        return self.is_kept

    def _finish(self) -> None:
        # the outcome first: who sees the end of the run reads it
        self._run_context.outcomes.save(self._error)
        with self._status_lock:
            self._is_finishing = True
        state, detail = self._end_state()
        try:
            self._run_context.take(StateChange(None, state, time.time(), detail))
            self._keep_status(state, ended=self.view.ended)
            self._run_context.record.close()
            if self._changing_nodes is not None:
                self._changing_nodes.leave(detail or _reason(self._error) or f"its run has {state}")
            self._at_end(self._rank_results)
        finally:
            self._worker_group = None
            self._over.set()

    def rename(self, name: str | None, tags: str) -> None:
        """Give the run another name, unless that is `None`, and other tags, while it goes on."""
        given = {"tags": tags} if name is None else {"name": name, "tags": tags}
        self.name = name or self.name
        self._facts["settings"] = {**self._facts.get("settings", {}), **given}
        self.tags = tags_of(self._facts)
        self._keep_status(self.view.state)

    def _keep_status(self, state: State, ended: float | None = None) -> None:
        """Write the run's status into its folder, for readers later or elsewhere."""
        metrics = {} if ended is None else metric_facts([self.view.rank(rank) for rank in self.view.ranks])
        self._run_context.record.status(
            name=self.name,
            why=self.why,
            state=state,
            started=self.started,
            ended=ended,
            ranks=len(self.view.ranks),
            error=str(self._error) if self._error else None,
            restarts=self.view.restarts[-1].attempt if self.view.restarts else 0,
            main_rank=self.main_rank,
            **{**self._facts, **self._run_context.outcomes.facts(), **metrics},
        )

    def _end_state(self) -> tuple[State, str]:
        stopped_at = self._worker_group.stopped_at if self._worker_group is not None else None
        if stopped_at is not None and isinstance(self._error, (StoppedError, type(None))):
            self.stopped_at = stopped_at
            return "stopped", f"as requested, {stopped_at}"
        if self._stopped is not None and (self._stopped != "finish" or isinstance(self._error, StoppedError)):
            return "stopped", "as requested"
        if self._error is None:
            return "finished", ""
        if isinstance(self._error, HangError) and self._error.hang is not None:
            return "failed", hang_reason(self._error.hang)
        if self._why_given_up:
            return "failed", f"not started again: {self._why_given_up}"
        lost = self._worker_group.lost if self._worker_group is not None else None
        return "failed", f"the workers were lost: {lost}" if lost else ""


def _explained(error: BaseException, text: str) -> BaseException:
    """The error of a run with one more paragraph."""
    if not text:
        return error
    if not isinstance(error, WorkerError):
        return LaunchError(f"{error}\n\n{text}")
    # the worker's class may be a frozen dataclass, which refuses plain assignment
    object.__setattr__(error, "message", f"{error.message}\n\n{text}")
    return error


def _reason(error: BaseException | None) -> str:
    """An error in one line for other nodes."""
    if not isinstance(error, AccelerateNbError):
        return "" if error is None else repr(error)
    return next(iter(str(error).splitlines()), "")
