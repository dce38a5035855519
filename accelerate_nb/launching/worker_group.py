"""One group of workers, followed from its start until every process has ended."""

from __future__ import annotations

import selectors
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from accelerate_nb.events.channel import EventReader
from accelerate_nb.events.model import OVER, DeviceSample, Failure, HostSample, State, StateChange, TaskDone
from accelerate_nb.failures.hang_report import StackSnapshot
from accelerate_nb.failures.rank_result import RankResult, died
from accelerate_nb.failures.stack_dumps import crash_text
from accelerate_nb.launching.engines.base import Engine, Workers
from accelerate_nb.launching.graceful_stop import StopNegotiation
from accelerate_nb.launching.idle_watchdog import IdleObserver
from accelerate_nb.launching.node_agent.output_reader import OutputReader
from accelerate_nb.launching.node_agent.rank_queries import RankQueries
from accelerate_nb.launching.planning.plan import LaunchPlan, rendezvous_socket
from accelerate_nb.launching.run_context import RunContext, Stop, stronger
from accelerate_nb.transport.connection import Connection, local_workers
from accelerate_nb.transport.messages import HoldAtBoundary, HoldReply, LeaveGroup, Message, StopAt
from accelerate_nb.transport.outcome import Raised, Returned
from accelerate_nb.transport.rank_info import MasterAddress

# Pipes are emptied at most this often: a reader that wakes for every line costs the workers more than the lines do.
_BETWEEN_READS = 0.02
_READ_AT_ONCE = 1 << 20
# Where nothing was written for so long, the pipes are watched instead of read, and this often it is checked what else may
# be due.
_DOZES_AFTER = 1.0
_DOZE = 1.0
# After the first failure: how long others may still report their own, and then end by themselves. A rank that only lost
# its connection waits longer for the one that caused it, which may still be cleaning up.
_SETTLE = 0.15
_SETTLE_WITHOUT_CAUSE = 1.0
_END_AFTER_FAILURE = 0.6
# How long workers may take to end once all have returned.
_PARTING = 2.5
# How many lines a process that died without an exception is quoted with.
_LAST_LINES = 8


class WorkerGroup:
    """
    Starts a plan's workers, reads what they send, and ends them.

    `follow` is called once, in the run's thread; `stop` and `stacks` may be called from any other.
    """

    def __init__(self, plan: LaunchPlan, engine: Engine, run_context: RunContext, number: int) -> None:
        self._plan, self._engine, self._run_context, self._number = plan, engine, run_context, number
        self._connection: list[Connection] = []
        self._reported: dict[int, float] = {}
        self._states: dict[int, State] = {}
        self._readers: dict[int, EventReader] = {}
        self._requested_stop: Stop | None = None
        self._killed: set[int] = set()
        self._failed_at: float | None = None
        self._cause_is_known = False
        # the ranks that have sent something
        self._connected: set[int] = set()
        self._queries = RankQueries(self._connected)
        # the ranks whose function has begun
        self._begun: set[int] = set()
        self._gone: set[int] = set()
        # how many lines a session's rank had written when it was last idle, or a former attempt's: they are not its last words
        self._idle_line_counts = {rank: run_context.view.line_count_of(rank) for rank in range(plan.size)}
        self._negotiation: StopNegotiation | None = None
        self._idle_observer = IdleObserver(run_context, self.snapshot)
        self._output = OutputReader(run_context, self._idle_observer.restart)
        self.timed_out: StackSnapshot | None = None
        self.lost: str | None = None

    @property
    def began(self) -> bool:
        """Whether the function has begun on some rank."""
        return bool(self._begun)

    @property
    def stopped_at(self) -> str | None:
        """The point at which ranks stopped on request."""
        return None if self._negotiation is None else self._negotiation.stopped_at

    def follow(self) -> tuple[RankResult, ...]:
        """Run the workers to their end; returns every rank's result, in the order of ranks."""
        waker_far, waker = socket.socketpair()
        for end in (waker_far, waker):
            end.setblocking(False)
        self._run_context.wake = lambda: _poke(waker)
        self._urgent = selectors.DefaultSelector()
        with waker_far, waker, self._urgent, self._output:
            self._urgent.register(waker_far, selectors.EVENT_READ, lambda: waker_far.recv(4096))
            try:
                self._start()
                self._until_over()
                self._until_gone()
                self._drain()
                return tuple(map(self._rank_result, range(self._plan.size)))
            finally:
                self._run_context.wake = lambda: None
                self._close()

    def stop(self, how: Stop) -> None:
        """Request the end; a stronger request from before stays."""
        self._requested_stop = stronger(self._requested_stop, how)
        self._run_context.wake()

    def send(self, rank: int, message: Message, descriptors: Sequence[int] = ()) -> bool:
        """Send a message to a worker's inbox; whether it could be delivered."""
        return self._queries.send(rank, message, descriptors)

    def snapshot(self) -> StackSnapshot:
        """The stacks and collectives of every rank; takes up to some seconds."""
        returned = sorted(rank for rank, state in self._states.items() if state == "finished")
        stacks = self.stacks()
        return StackSnapshot(stacks, self._queries.collectives(stacks), returned)

    def stacks(self) -> dict[int, str]:
        """The stack dump of every rank whose function runs; empty where a rank sends none."""
        workers = getattr(self, "_workers", None)  # none before they are started
        return {} if workers is None else self._queries.stacks(lambda: {*self._gone, *self._reported}, workers)

    # ------------------------------------------------------------------------------------------------------- steps

    def _start(self) -> None:
        self._workers: Workers
        with rendezvous_socket(self._plan.port) as rendezvous:
            self._connection = [Connection.open() for _ in range(self._plan.size)]
            self._queries.connections = self._connection
            for rank, connection in enumerate(self._connection):
                self._listen(rank, connection)
                self._run_context.take(StateChange(rank, "starting", time.time()))
            specs = self._plan.specs(MasterAddress(*rendezvous.getsockname()), self._number)
            workers = local_workers(specs, self._connection, self._plan.payload, rendezvous.fileno())
            self._workers = self._engine.start(workers)
        for connection in self._connection:
            connection.close()
        for descriptor in self._workers.exit_descriptors():
            self._urgent.register(descriptor, selectors.EVENT_READ, self._on_exits)

    def _listen(self, rank: int, connection: Connection) -> None:
        self._readers[rank] = EventReader()
        self._urgent.register(connection.events, selectors.EVENT_READ, lambda: self._on_events(rank))
        self._output.listen(rank, connection)

    def _until_over(self) -> None:
        """Until every rank has returned, or there is a reason to end them; then they are ended."""
        read_next = 0.0
        while not self._all_reported():
            now = time.monotonic()
            if now >= read_next:
                self._output.read()
                read_next = now + _BETWEEN_READS
            self._step(self._doze(now) if self._may_doze(now) else _BETWEEN_READS)
            self._idle_observer.check()
            if self._requested_stop == "finish" and self._negotiation is None and self.began:
                self._negotiation = self._request_hold()
            # one that has not begun makes no step after which it could stop
            is_stopped = self._requested_stop is not None and (self._requested_stop != "finish" or not self.began)
            negotiation = self._negotiation
            if is_stopped or (negotiation and negotiation.needs_force(self._reported, time.monotonic())):
                return self._end_within(self._run_context.stop_grace_period)
            if self._run_context.deadline is not None and time.monotonic() > self._run_context.deadline:
                self.timed_out = self.snapshot()
                return self._kill()
            if self.lost is not None:
                return self._kill()
            if self._has_settled():
                return self._end_within(_END_AFTER_FAILURE)
        return None

    def _may_doze(self, now: float) -> bool:
        is_idle = now - self._output.wrote_last > _DOZES_AFTER and not self._idle_observer.is_busy
        nothing_is_pending = self._requested_stop is None and self._negotiation is None and self._failed_at is None
        return is_idle and nothing_is_pending and bool(self._workers.exit_descriptors())

    def _doze(self, now: float) -> float:
        """Be woken by whatever is written; returns for how long nothing else needs to be checked."""
        # Linux's and macOS's selectors can be waited for themselves
        logs = self._output.fileno()
        if logs not in self._urgent.get_map():
            self._urgent.register(logs, selectors.EVENT_READ, lambda: self._wake(logs))
        deadline = self._run_context.deadline
        due = self._idle_observer.due if deadline is None else min(self._idle_observer.due, deadline)
        return min(max(due - now, 0.0), _DOZE)

    def _wake(self, logs: int) -> None:
        self._urgent.unregister(logs)
        self._output.wrote_last = time.monotonic()

    def restart_watchdog(self, timeout: float) -> None:
        """Restart the idle watchdog, since workers got a new task; it warns after so many seconds."""
        self._idle_observer.restart(timeout)
        self._run_context.wake()

    def _request_hold(self) -> StopNegotiation:
        """Have every rank that runs wait at the end of its step, and reply with its position."""
        ranks = [rank for rank in range(self._plan.size) if rank not in self._reported]
        negotiation = StopNegotiation(ranks, self._run_context.stop_grace_period, time.monotonic())
        for rank in ranks:
            self._queries.query(rank, HoldAtBoundary(), partial(self._take_position, negotiation, rank), self._urgent)
        return negotiation

    def _take_position(self, negotiation: StopNegotiation, rank: int, reply: Message | None) -> None:
        negotiation.reply(rank, reply.position if isinstance(reply, HoldReply) else None, time.monotonic())
        if negotiation.last_step is not None:
            for held_rank in negotiation.ranks:
                self.send(held_rank, StopAt(negotiation.stop_point_of(held_rank)))

    def _end_within(self, stop_grace_period: float) -> None:
        """Interrupt those that run, and kill those that are still there after `stop_grace_period` seconds."""
        self._interrupt()
        deadline = time.monotonic() + stop_grace_period
        while not self._all_reported() and time.monotonic() < deadline and self._requested_stop != "kill":
            self._output.read()
            self._step(_BETWEEN_READS)
        if not self._all_reported():
            self._kill()

    def _until_gone(self) -> None:
        """Let the workers leave, and wait until each process has ended."""
        for rank in range(self._plan.size):
            self.send(rank, LeaveGroup())
        deadline = time.monotonic() + _PARTING
        while len(self._workers.exit_codes()) < self._plan.size and self._workers.lost() is None:
            if time.monotonic() > deadline:
                self._kill()
            self._output.read()
            self._step(_BETWEEN_READS)
        if self._workers.lost() is not None:
            self._kill()

    def _step(self, timeout: float) -> None:
        for key, _ in self._urgent.select(timeout):
            key.data()
        if not self._workers.exit_descriptors():
            self._on_exits()

    def _interrupt(self) -> None:
        # on request, only those that have begun: one that still loads modules, or its payload, has nothing to end cleanly
        there = self._begun if self._requested_stop is not None else self._connected
        begun = {other for rank in there for other in self._plan.ranks_in_process(rank)}
        # the others have not begun anything, and may not be listening yet
        others = set(range(self._plan.size)) - begun
        self._killed.update(others)
        self._workers.signal(signal.SIGINT, begun)
        self._workers.signal(signal.SIGKILL, others)

    def _kill(self) -> None:
        self._killed.update(range(self._plan.size))
        self._workers.kill()

    def _close(self) -> None:
        self._run_context.record.flush()
        with self._queries.closing():
            # nothing is sent to anybody any more
            self._gone.update(range(self._plan.size))
            if hasattr(self, "_workers"):
                self._workers.kill()
                self._workers.close()
            for connection in self._connection:
                connection.cut()

    # ----------------------------------------------------------------------------------------------------- receiving

    def _on_exits(self) -> None:
        self._workers.news()
        for rank, code in self._workers.exit_codes().items():
            self._gone.add(rank)
            if rank not in self._reported:
                # what it sent last may still be on its way
                self._on_events(rank)
            if rank not in self._reported:
                self._reported[rank] = time.time()
                self._cause_is_known = True
                self._fail()
                by_us = self._was_killed_by_us(rank, code)
                state: State = "stopped" if by_us else "failed"
                detail = "ended with the others" if by_us else f"exit code {code}"
                self._run_context.take(StateChange(rank, state, time.time(), detail))
        self.lost = self._workers.lost()
        exit_descriptors = self._workers.exit_descriptors()
        for descriptor in [key.fd for key in self._urgent.get_map().values() if key.data == self._on_exits]:
            # a descriptor that has reported an end would report it for ever
            if descriptor not in exit_descriptors:
                self._urgent.unregister(descriptor)

    def _on_events(self, rank: int) -> None:
        sock = self._connection[rank].events
        try:
            data = sock.recv(_READ_AT_ONCE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            if sock.fileno() in self._urgent.get_map():
                self._urgent.unregister(sock)
            return
        self._connected.add(rank)
        for event in self._readers[rank].feed(data):
            if isinstance(event, StateChange):
                self._on_state(rank, event)
            if isinstance(event, Failure) and not event.lost_connection:
                self._cause_is_known = True
            if not isinstance(event, (DeviceSample, HostSample)):
                self._idle_observer.restart()
            if isinstance(event, TaskDone):
                self._output.read_all_of(rank)
                self._idle_line_counts[rank] = self._run_context.view.line_count_of(rank)
            self._run_context.take(event)

    def _on_state(self, rank: int, change: StateChange) -> None:
        if change.state == "running":
            self._begun.add(rank)
        if change.state == "stopping" and self._negotiation is not None:
            self._negotiation.stopped(rank, change.detail)
        if change.state in OVER:
            self._reported[rank], self._states[rank] = change.time, change.state
            # after a stop request to all, those that have stopped wait for those that still save
            if change.state == "failed" or (change.state == "stopped" and self._negotiation is None):
                self._fail()

    def _fail(self) -> None:
        if self._failed_at is None:
            self._failed_at = time.monotonic()

    def _drain(self) -> None:
        """Read what is left."""
        self._output.drain()
        for rank in range(self._plan.size):
            self._on_events(rank)

    # ----------------------------------------------------------------------------------------------------- judging

    def _all_reported(self) -> bool:
        return len(self._reported) == self._plan.size

    def _has_settled(self) -> bool:
        """Whether a rank has failed, and others have had their time to report why."""
        timeout = _SETTLE if self._cause_is_known else _SETTLE_WITHOUT_CAUSE
        return self._failed_at is not None and time.monotonic() - self._failed_at > timeout

    def _rank_result(self, rank: int) -> RankResult:
        outcome = self._run_context.read_outcome(rank, self._connection[rank].outcome)
        if isinstance(outcome, Returned):
            return RankResult(rank, value=outcome.value, modules=outcome.modules)
        if isinstance(outcome, Raised):
            return RankResult(rank, failure=outcome.failure, error=outcome.error, modules=outcome.modules)
        failure = outcome if outcome is not None else self._death(rank)
        if rank not in self._reported:
            # nobody was left to report its end
            state: State = "stopped" if failure.ended_by_us else "failed"
            detail = failure.message if failure.ended_by_us else ""
            self._run_context.take(StateChange(rank, state, time.time(), detail))
        self._run_context.take(failure)
        return RankResult(rank, failure=failure)

    def _was_killed_by_us(self, rank: int, code: int) -> bool:
        return rank in self._killed and code == -signal.SIGKILL

    def _death(self, rank: int) -> Failure:
        code = self._workers.exit_codes().get(rank, -int(signal.SIGKILL))
        ranks_in_process = self._plan.ranks_in_process(rank)
        # which of several ranks ended their process is not known
        several = [f"[{other}] {text}" for other in ranks_in_process for text in self._last_words(other)]
        last = several if len(ranks_in_process) > 1 else self._last_words(rank)
        by_us = self._was_killed_by_us(rank, code)
        when = self._reported.get(rank, time.time())
        # a process writes about its crash where its first rank writes its stacks
        crash = crash_text(self._connection[ranks_in_process[0]].stacks, self._run_context.sources)
        return died(rank, code, last_lines=last, crash=crash, time=when, ended_by_us=by_us)

    def _last_words(self, rank: int) -> list[str]:
        since = self._run_context.view.line_count_of(rank) - self._idle_line_counts.get(rank, 0)
        return [line.text for line in self._run_context.view.tail(rank, min(since, _LAST_LINES))]


def _poke(sock: socket.socket) -> None:
    # where it is full, or its reader has gone, nobody needs to be woken
    with suppress(OSError):
        sock.send(b"\n")
