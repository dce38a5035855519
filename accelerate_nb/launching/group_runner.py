"""The runner of one group of workers: it stands between the group's state machine, its agent, and the run."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Sequence
from typing import cast

from accelerate_nb.events.model import DeviceSample, Event, Failure, HostSample, State, StateChange, TaskDone
from accelerate_nb.failures.hang_report import StackSnapshot
from accelerate_nb.failures.rank_result import RankResult, died
from accelerate_nb.failures.stack_dumps import crash_text
from accelerate_nb.launching.engines.base import Engine
from accelerate_nb.launching.idle_watchdog import IdleObserver
from accelerate_nb.launching.node_agent.agent import NodeAgent
from accelerate_nb.launching.planning.plan import LaunchPlan, rendezvous_socket
from accelerate_nb.launching.run_context import RunContext, Stop
from accelerate_nb.launching.worker_group import Decision, WorkerGroup
from accelerate_nb.transport.messages import Message, RankEvent, RankOutput
from accelerate_nb.transport.outcome import Raised, Returned
from accelerate_nb.transport.rank_info import MasterAddress

# Pipes are emptied at most this often: a reader that wakes for every line costs the workers more than the lines do.
_BETWEEN_READS = 0.02
# Where nothing was written for so long, the pipes are watched instead of read, and this often it is checked what else may
# be due.
_DOZES_AFTER = 1.0
_DOZE = 1.0
# How many lines a process that died without an exception is quoted with.
_LAST_LINES = 8


class GroupRunner:
    """
    Runs a plan's workers with an agent in this process, whose messages go from hand to hand.

    `follow` is called once, in the run's thread; `stop` and `stacks` may be called from any other.
    """

    def __init__(self, plan: LaunchPlan, engine: Engine, run_context: RunContext, number: int) -> None:
        self._plan, self._run_context, self._number = plan, run_context, number
        self._group = WorkerGroup(
            plan.size,
            run_context.stop_grace_period,
            deadline=run_context.deadline,
            ranks_per_process=plan.ranks_per_process,
        )
        self._agent = NodeAgent(plan.size, engine, run_context.record, self._take)
        self._idle_observer = IdleObserver(run_context, self.snapshot)
        # how many lines a session's rank had written when it was last idle, or a former attempt's: they are not its last words
        self._idle_line_counts = {rank: run_context.view.line_count_of(rank) for rank in range(plan.size)}
        self.timed_out: StackSnapshot | None = None

    @property
    def began(self) -> bool:
        """Whether the function has begun on some rank."""
        return bool(self._group.begun)

    @property
    def stopped_at(self) -> str | None:
        """The point at which ranks stopped on request."""
        return self._group.stopped_at

    @property
    def lost(self) -> str | None:
        """The reason why the workers can't be observed any more."""
        return self._group.lost

    def follow(self) -> tuple[RankResult, ...]:
        """Run the workers to their end; returns every rank's result, in the order of ranks."""
        self._run_context.wake = self._agent.wake
        with self._agent:
            try:
                self._start()
                self._until_over()
                self._agent.drain()
                return tuple(map(self._rank_result, range(self._plan.size)))
            finally:
                self._run_context.wake = lambda: None
                self._run_context.record.flush()

    def stop(self, how: Stop) -> None:
        """Request the end; a stronger request from before stays."""
        self._group.stop(how)
        self._run_context.wake()

    def send(self, rank: int, message: Message, descriptors: Sequence[int] = ()) -> bool:
        """Send a message to a worker's inbox; whether it could be delivered."""
        return self._agent.send(rank, message, descriptors)

    def restart_watchdog(self, timeout: float) -> None:
        """Restart the idle watchdog, since workers got a new task; it warns after so many seconds."""
        self._idle_observer.restart(timeout)
        self._run_context.wake()

    def snapshot(self) -> StackSnapshot:
        """The stacks and collectives of every rank; takes up to some seconds."""
        returned = sorted(rank for rank, state in self._group.states.items() if state == "finished")
        stacks = self._agent.stacks(lambda: tuple(self._group.reported))
        return StackSnapshot(stacks, self._agent.collectives(tuple(stacks)), returned)

    # ------------------------------------------------------------------------------------------------------- steps

    def _start(self) -> None:
        with rendezvous_socket(self._plan.port) as rendezvous:
            self._agent.open()
            for rank in range(self._plan.size):
                self._run_context.take(StateChange(rank, "starting", time.time()))
            specs = self._plan.specs(MasterAddress(*rendezvous.getsockname()), self._number)
            self._agent.start(specs, self._plan.payload, rendezvous.fileno())

    def _until_over(self) -> None:
        """Until every process has ended."""
        read_next = 0.0
        self._carry_out(self._group.advance(time.monotonic()))
        while self._group.phase != "over":
            now = time.monotonic()
            if now >= read_next:
                self._agent.read_output()
                read_next = now + _BETWEEN_READS
            if self._may_doze(now):
                self._agent.doze(self._doze_time(now))
            else:
                self._agent.wait(_BETWEEN_READS)
            if self._group.phase == "running":
                self._idle_observer.check()
            self._carry_out(self._group.advance(time.monotonic()))

    def _may_doze(self, now: float) -> bool:
        is_idle = now - self._agent.wrote_last > _DOZES_AFTER and not self._idle_observer.is_busy
        return is_idle and not self._group.is_pending and self._agent.sees_exits

    def _doze_time(self, now: float) -> float:
        """The time for which nothing else needs to be checked."""
        deadline = self._run_context.deadline
        due = self._idle_observer.due if deadline is None else min(self._idle_observer.due, deadline)
        return min(max(due - now, 0.0), _DOZE)

    # ----------------------------------------------------------------------------------------------------- messages

    def _take(self, report: Message) -> None:
        """Take a report of the agent."""
        decisions = self._group.take(report, time.monotonic())
        match report:
            case RankOutput():
                self._idle_observer.restart()
                # the run's folder has the output itself
                for line in decisions:
                    self._run_context.view.apply(cast("Event", line))
                return
            case RankEvent(rank, _, event):
                if not isinstance(event, (DeviceSample, HostSample)):
                    self._idle_observer.restart()
                if isinstance(event, TaskDone):
                    self._idle_line_counts[rank] = self._run_context.view.line_count_of(rank)
        self._carry_out(decisions)

    def _carry_out(self, decisions: Iterable[Decision]) -> None:
        if self._group.has_timed_out and self.timed_out is None:
            # before the ranks are killed
            self.timed_out = self.snapshot()
        for decision in decisions:
            if isinstance(decision, Message):
                self._agent.carry_out(decision)
            else:
                self._run_context.take(decision)

    # ----------------------------------------------------------------------------------------------------- judging

    def _rank_result(self, rank: int) -> RankResult:
        outcome = self._run_context.read_outcome(rank, self._agent.outcome_file(rank))
        if isinstance(outcome, Returned):
            return RankResult(rank, value=outcome.value, modules=outcome.modules)
        if isinstance(outcome, Raised):
            return RankResult(rank, failure=outcome.failure, error=outcome.error, modules=outcome.modules)
        failure = outcome if outcome is not None else self._death(rank)
        if rank not in self._group.reported:
            # nobody was left to report its end
            state: State = "stopped" if failure.ended_by_us else "failed"
            detail = failure.message if failure.ended_by_us else ""
            self._run_context.take(StateChange(rank, state, time.time(), detail))
        self._run_context.take(failure)
        return RankResult(rank, failure=failure)

    def _death(self, rank: int) -> Failure:
        code = self._agent.exit_codes().get(rank, -int(signal.SIGKILL))
        ranks_in_process = self._group.ranks_in_process(rank)
        # which of several ranks ended their process is not known
        several = [f"[{other}] {text}" for other in ranks_in_process for text in self._last_words(other)]
        last = several if len(ranks_in_process) > 1 else self._last_words(rank)
        by_us = self._group.was_killed_by_us(rank, code)
        when = self._group.reported.get(rank, time.time())
        # a process writes about its crash where its first rank writes its stacks
        crash = crash_text(self._agent.stacks_file(ranks_in_process[0]), self._run_context.sources)
        return died(rank, code, last_lines=last, crash=crash, time=when, ended_by_us=by_us)

    def _last_words(self, rank: int) -> list[str]:
        since = self._run_context.view.line_count_of(rank) - self._idle_line_counts[rank]
        return [line.text for line in self._run_context.view.tail(rank, min(since, _LAST_LINES))]
