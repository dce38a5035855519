"""The runner of one group of workers, between the group's state machine, its agents, and the run's context, which all groups of a run share."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from msgspec import structs

from accelerate_nb.events import event_types
from accelerate_nb.events.run_folder import BETWEEN_OUTPUT_FLUSHES, RunRecorder
from accelerate_nb.events.run_state import RunState
from accelerate_nb.failures.hang_report import StackSnapshot, diagnosis, is_at_work, waits_for_returned
from accelerate_nb.failures.rank_result import RankResult, death_failure, node_loss_failure
from accelerate_nb.failures.stack_dumps import crash_text
from accelerate_nb.launching.node_agent.agent import BETWEEN_READS, LONGEST_WAIT, Agent, AgentLoop, Report
from accelerate_nb.launching.planning.placement import LaunchPlan, host_store, rendezvous_socket
from accelerate_nb.launching.worker_group import Decision, Stop, WorkerGroup
from accelerate_nb.sources.cells import CellSources
from accelerate_nb.transport import messages
from accelerate_nb.transport.outcome import read_result
from accelerate_nb.transport.worker_spec import NetworkAddress

# How many lines a process that died without an exception is quoted with.
_LAST_LINES = 8
# The logs of more ranks are not written at each of their lines: that would be a fifth of this process's work.
_MANY_RANKS = 64

# Makes the agent of one node, which reports to the runner from its loop.
AgentFactory: TypeAlias = Callable[[AgentLoop, Report], Agent]


class Outcomes:
    """The outcomes of a run, read into this process; those of a detached run are kept in its folder (`SavedOutcomes`)."""

    def read(self, _rank: int, descriptor: int) -> RankResult | None:
        """A rank's result, from the file in which its worker left it."""
        return read_result(descriptor)

    def save(self, _error: BaseException | None) -> bool:
        """Keep what ended the run for other processes; whether that was possible."""
        return True

    def facts(self) -> dict[str, Any]:
        """The facts that the run's status has for other processes."""
        return {}


@dataclass(slots=True)
class RunContext:
    """The context that a run's worker groups share: the state and record of its events, the notebook's lines, and the limits of time."""

    view: RunState
    record: RunRecorder
    sources: CellSources
    deadline: float | None
    stop_grace_period: float
    hang_warning_after: float = 0.0
    wake: Callable[[], None] = lambda: None
    on_event: Callable[[event_types.Event], None] = lambda _: None
    # of a session: the ranks that have returned from its tasks, and the end of those that wait for them; whether there are such
    returned_from_task: Callable[[], Collection[int]] = tuple
    end_task: Callable[[StackSnapshot], bool] = lambda _: False
    outcomes: Outcomes = field(default_factory=Outcomes)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, event: event_types.Event) -> None:
        """Keep an event, from any thread."""
        with self._lock:
            self.view.apply(event)
            self.record.event(event)
        self.on_event(event)


class IdleWatchdog:
    """Warns of ranks from which nothing comes for `timeout` seconds, again when that has doubled, by a snapshot of them."""

    def __init__(
        self,
        run_context: RunContext,
        snapshot: Callable[[], StackSnapshot],
        end_deadlock: Callable[[StackSnapshot], None],
    ) -> None:
        self._run_context, self._snapshot, self._end_deadlock = run_context, snapshot, end_deadlock
        self._timeout, self._since, self._warned_after = run_context.hang_warning_after, time.monotonic(), 0.0
        self._thread: threading.Thread | None = None
        self._found: tuple[float, StackSnapshot] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a snapshot is being taken, which takes seconds, in a thread of its own."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def due(self) -> float:
        """The time of the next warning, if nothing is received until then."""
        return self._since + max(self._timeout, 2 * self._warned_after) if self._timeout else float("inf")

    def check(self) -> None:
        """Warn of what the last snapshot shows, and take another where it is due; in the run's thread."""
        found, self._found = self._found, None
        if found is not None and found[0] == self._since:
            lasts = time.monotonic() - found[0]
            where = diagnosis(found[1], self._run_context.sources)
            text = f"Nothing has come from any rank for {lasts:.0f} s.\n{where}"
            self._run_context.take(event_types.IdleWarning(lasts, text, time.time()))
            if waits_for_returned(found[1]):
                self._end_deadlock(found[1])
        if (now := time.monotonic()) >= self.due:
            self._warned_after = now - self._since
            if not self.is_busy:
                self._thread = threading.Thread(target=self._observe, name="accelerate_nb observer", daemon=True)
                self._thread.start()

    def restart(self, timeout: float | None = None) -> None:
        """Start again, since something was received; with another `timeout` in seconds where it is given."""
        if timeout is not None:
            self._timeout = timeout
        was_warned, self._warned_after, self._since = self._warned_after > 0, 0.0, time.monotonic()
        if was_warned:
            self._run_context.take(event_types.IdleWarning(0, "", time.time()))

    def _observe(self) -> None:
        since, snapshot = self._since, self._snapshot()
        if is_at_work(snapshot):
            self._found = since, snapshot
            self._run_context.wake()


class GroupRunner:
    """Runs a plan's workers through agents, one a node, whose messages it hands to the group and to the run."""

    # `follow` is called once, in the run's thread; `stop`, `send` and `snapshot` from any. `master` is the rendezvous,
    # where it is open: in the agent of rank 0, or on the listening socket `store`, which stays the caller's.

    def __init__(
        self,
        plan: LaunchPlan,
        agents: Sequence[AgentFactory],
        run_context: RunContext,
        number: int,
        master: NetworkAddress | None = None,
        *,
        store: socket.socket | None = None,
        group: WorkerGroup | None = None,
    ) -> None:
        self._plan, self._run_context, self._number, self._master = plan, run_context, number, master
        self._listener = store
        self.group = group or WorkerGroup(plan.size, run_context.stop_grace_period, deadline=run_context.deadline)
        self._loop = AgentLoop()
        self._agents = [make(self._loop, self._take) for make in agents]
        self._agent_of: dict[int, Agent] = {}
        self._watchdog = IdleWatchdog(run_context, self.snapshot, self._end_deadlock)
        # how many lines a session's rank had written when it was last idle, or a former attempt's: they are not its last words
        self._idle_line_counts = {rank: run_context.view.line_count_of(rank) for rank in range(plan.size)}
        # the files that ranks have left: of their outcomes, and of their replies to tasks
        self._outcomes: dict[int, int] = {}
        self._replies: dict[tuple[int, int], int] = {}
        self._crash_dumps: dict[int, str] = {}
        self._failures: dict[int, event_types.Failure] = {}
        record = run_context.record
        self._keep_output = record.add_output if plan.size > _MANY_RANKS else record.output
        self._store: object = None
        self.timed_out: StackSnapshot | None = None

    def follow(self) -> tuple[RankResult, ...]:
        """Run the workers to their end; returns every rank's result, in the order of ranks."""
        self._run_context.wake = self._loop.wake
        with closing(self._loop), ExitStack() as agents:
            for agent in self._agents:
                agents.callback(agent.close)
            try:
                self._start()
                self._until_over()
                for agent in self._agents:
                    agent.drain()
                return tuple(map(self._rank_result, range(self._plan.size)))
            finally:
                self._run_context.wake = lambda: None
                self._run_context.record.flush()
                for descriptor in (*self._outcomes.values(), *self._replies.values()):
                    os.close(descriptor)

    def stop(self, how: Stop) -> None:
        self.group.stop(how)
        self._run_context.wake()

    def send(self, rank: int, message: messages.RankMessage, descriptors: Sequence[int] = ()) -> None:
        """Send a message to a worker's inbox, where the worker is there."""
        if (agent := self._agent_of.get(rank)) is not None:
            agent.carry_out(messages.ToRank(rank, message), descriptors)

    def task_reply(self, rank: int, task: int) -> int:
        """The file of a rank's reply to a session's task, which has ended; it is the caller's to close."""
        return self._replies.pop((rank, task))

    def restart_watchdog(self, timeout: float) -> None:
        """Restart the idle watchdog, since workers got a new task; it warns after so many seconds."""
        self._watchdog.restart(timeout)
        self._run_context.wake()

    def snapshot(self) -> StackSnapshot:
        """The stacks and collectives of every rank; takes up to some seconds."""
        returned = {rank for rank, state in self.group.states.items() if state == "finished"}
        returned.update(self._run_context.returned_from_task())
        running = set(self._agent_of) - self.group.reported.keys() - returned
        with ThreadPoolExecutor(len(self._agents), "accelerate_nb query") as threads:
            found = list(threads.map(lambda agent: agent.snapshot(sorted(running & {*agent.ranks})), self._agents))
        return StackSnapshot(
            {rank: text for snapshot in found for rank, text in snapshot.replies.items()},
            {rank: entries for snapshot in found for rank, entries in snapshot.collectives.items()},
            sorted(returned),
        )

    def _start(self) -> None:
        for rank in range(self._plan.size):
            self._run_context.take(event_types.StateChange(rank, "starting", time.time()))
        if self._master is not None:
            self._start_workers(self._master, () if self._listener is None else (self._listener.fileno(),))
            return
        with rendezvous_socket(self._plan.port) as rendezvous:
            master, store = NetworkAddress(*rendezvous.getsockname()), [rendezvous.fileno()]
            if not self._agents[0].takes_sockets:
                # rank 0's process can't be the store's host
                self._store, store = host_store(rendezvous), []
            self._start_workers(master, store)

    def _start_workers(self, master: NetworkAddress, store: Sequence[int] = ()) -> None:
        """Start every node's workers; rank 0's process gets the listening socket of the store."""
        for agent, specs in zip(self._agents, self._plan.specs(master, self._number), strict=True):
            request = messages.StartWorkers(specs, has_store=bool(store))
            self._agent_of.update(dict.fromkeys(request.ranks, agent))
            agent.start(request, [*self._plan.payload.descriptors, *store])
            store = ()

    def _until_over(self) -> None:
        self._carry_out(self.group.advance(time.monotonic()))
        while self.group.phase != "over":
            now = time.monotonic()
            if self.group.is_pending or self._watchdog.is_busy:
                idle_time = BETWEEN_READS
            else:
                longest = BETWEEN_OUTPUT_FLUSHES if self._run_context.record.has_unwritten else LONGEST_WAIT
                due = min(self._watchdog.due, self._run_context.deadline or float("inf"))
                idle_time = min(max(due - now, 0.0), longest)
            self._loop.wait(min(agent.tick(now, idle_time) for agent in self._agents))
            self._run_context.record.flush_output(time.monotonic())
            if self.group.phase == "running":
                self._watchdog.check()
            self._carry_out(self.group.advance(time.monotonic()))

    def _end_deadlock(self, snapshot: StackSnapshot) -> None:
        """End what waits for ranks that have returned: the task of a session, or the group."""
        if not self._run_context.end_task(snapshot):
            self.timed_out, self.group.is_deadlocked = snapshot, True

    def _take(self, report: messages.Message, descriptors: Sequence[int] = ()) -> None:
        if isinstance(report, messages.RankOutput):
            self._take_output(report)
            return
        decisions = self.group.take(report, time.monotonic())
        match report:
            case messages.NodeLoad(sample, devices):
                # for the view alone: it is no sign of life of any rank
                for event in (*devices, sample):
                    if isinstance(event, (event_types.DeviceSample, event_types.HostSample)):
                        self._run_context.view.apply(event)
                return
            case messages.RankEvent(rank, _, event):
                self._note_event(rank, event)
            case messages.RankOutcome(rank):
                self._outcomes[rank] = descriptors[0]
            case messages.RankTaskReply(rank, _, task):
                self._replies[rank, task] = descriptors[0]
            case messages.RankExited(rank):
                self._crash_dumps[rank] = report.stacks
        self._carry_out(decisions)

    def _take_output(self, output: messages.RankOutput) -> None:
        self._watchdog.restart()
        if not self.group.is_next(output):
            return
        if output.raw:
            self._keep_output(output.rank, output.raw)
        # the run's folder has the output itself
        self._run_context.view.apply_lines(output.lines)

    def _note_event(self, rank: int, event: event_types.Event) -> None:
        if not isinstance(event, (event_types.DeviceSample, event_types.HostSample)):
            self._watchdog.restart()
        if isinstance(event, event_types.Failure):
            self._failures[rank] = event
        if isinstance(event, event_types.TaskDone):
            self._idle_line_counts[rank] = self._run_context.view.line_count_of(rank)

    def _carry_out(self, decisions: Iterable[Decision]) -> None:
        if self.group.cause == "timed_out" and self.timed_out is None:
            # before the ranks are killed
            self.timed_out = self.snapshot()
        for decision in decisions:
            if isinstance(decision, messages.Message):
                for agent in self._agents:
                    if (message := _part_for(agent, decision)) is not None:
                        agent.carry_out(message)
            else:
                self._run_context.take(decision)

    def _rank_result(self, rank: int) -> RankResult:
        file = self._outcomes.get(rank)
        result = None if file is None else self._run_context.outcomes.read(rank, file)
        if result is not None:
            return result
        if not self._agent_of[rank].has_outcomes:
            if self.group.states.get(rank) == "finished":
                return RankResult(rank)
            if (reported := self._failures.get(rank)) is not None:
                return RankResult(rank, failure=reported)
        failure = self._death(rank)
        if rank not in self.group.reported:
            # nobody was left to report its end
            state: event_types.State = "stopped" if failure.ended_by_us else "failed"
            detail = failure.message if failure.ended_by_us else ""
            self._run_context.take(event_types.StateChange(rank, state, time.time(), detail))
        self._run_context.take(failure)
        return RankResult(rank, failure=failure)

    def _death(self, rank: int) -> event_types.Failure:
        code = self.group.exit_codes.get(rank, -int(signal.SIGKILL))
        since = self._run_context.view.line_count_of(rank) - self._idle_line_counts[rank]
        last = [line.text for line in self._run_context.view.tail(rank, min(since, _LAST_LINES))]
        by_us = rank in self.group.killed
        when = self.group.reported.get(rank, time.time())
        if len(self._agents) > 1 and rank in self.group.lost_ranks - self.group.exit_codes.keys():
            return node_loss_failure(rank, last_lines=last, time=when)
        crash = crash_text(self._crash_dumps.get(rank, ""), self._run_context.sources)
        return death_failure(rank, code, last_lines=last, crash=crash, time=when, ended_by_us=by_us)


def _part_for(agent: Agent, message: messages.Message) -> messages.Message | None:
    """The part of a group's message that is for an agent's ranks; `None` where there is none."""
    match message:
        case messages.SignalRanks() | messages.ReleaseRanks():
            ranks = tuple(rank for rank in message.ranks if rank in agent.ranks)
            return structs.replace(message, ranks=ranks) if ranks else None
        case messages.ToRank(rank):
            return message if rank in agent.ranks else None
    return message
