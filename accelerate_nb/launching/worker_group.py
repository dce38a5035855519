"""The state machine of one group of workers, from its start until every process has ended."""

import signal
from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

from accelerate_nb.events.event_types import OVER, Event, Failure, HeldAt, State, StateChange
from accelerate_nb.launching.step_requests import StopNegotiation
from accelerate_nb.rank.step_hold import STOP
from accelerate_nb.transport import messages

# After the first failure: how long others may still report their own, and then end by themselves. A rank that only lost
# its connection waits longer for the one that caused it, which may still be cleaning up.
_SETTLE = 0.15
_SETTLE_WITHOUT_CAUSE = 1.0
_END_AFTER_FAILURE = 0.6
# How long workers may take to end once all have returned.
_PARTING = 2.5

# Ended after a step that all ranks share, interrupted wherever they are, or killed on the spot.
Stop: TypeAlias = Literal["finish", "interrupt", "kill"]
_FORCE: tuple[Stop | None, ...] = (None, "finish", "interrupt", "kill")
# Running; ending by an interrupt; released, until every process has ended; and over.
Phase: TypeAlias = Literal["running", "ending", "leaving", "over"]
# Why the ranks of a group end: they have returned, what became of one of them or of its node, a limit, or the stop that was requested.
EndCause: TypeAlias = (
    Literal["returned", "failed", "died", "node_lost", "workers_lost", "timed_out", "deadlocked"] | Stop
)
# A message for the agents, or an event that belongs to the run.
Decision: TypeAlias = messages.Message | Event


def stronger(before: Stop | None, how: Stop) -> Stop:
    """Of two ways to end a run the one with more force."""
    return how if _FORCE.index(how) > _FORCE.index(before) else before or how


class WorkerGroup:
    """Decides what happens to `size` ranks by values alone: reports and seconds in, messages and events out."""

    def __init__(self, size: int, stop_grace_period: float, *, deadline: float | None = None) -> None:
        self.size, self.deadline = size, deadline
        self._stop_grace_period = stop_grace_period
        self.phase: Phase = "running"
        self.requested_stop: Stop | None = None
        self.negotiation: StopNegotiation | None = None
        # the point at which the first rank stopped on request, in words
        self.stopped_at: str | None = None
        # the ranks that have sent something, those whose function has begun, and those that have ended with the time
        self.connected: set[int] = set()
        self.begun: set[int] = set()
        self.reported: dict[int, float] = {}
        self.states: dict[int, State] = {}
        self.exit_codes: dict[int, int] = {}
        # why agents can't be reached any more, and the ranks that they had
        self.lost: str | None = None
        self.lost_ranks: set[int] = set()
        # the ranks that this group has killed, as far as their agents could report
        self.killed: set[int] = set()
        # whether ranks wait for one that has returned
        self.is_deadlocked = False
        # why the ranks end, once they are not left to run
        self.cause: EndCause | None = None
        # reports that came twice
        self.repeated = 0
        self._numbers: dict[int, int] = {}
        self._failed_at: float | None = None
        # what became of the first rank that did not only follow another one
        self._failure: EndCause | None = None
        # the end of the phase, on the clock of `advance`
        self._until = float("inf")

    @property
    def all_reported(self) -> bool:
        return len(self.reported) == self.size

    @property
    def _is_all_lost(self) -> bool:
        return len(self.lost_ranks) == self.size

    @property
    def is_pending(self) -> bool:
        """Whether something is about to be due: a stop is under way, a failure settles, or processes end."""
        is_stopping = self.requested_stop is not None or self.negotiation is not None
        return self.phase != "running" or is_stopping or self._failed_at is not None

    def stop(self, how: Stop) -> None:
        """Request the end, from any thread; a stronger request from before stays."""
        self.requested_stop = stronger(self.requested_stop, how)

    def take(self, report: messages.Message, now: float) -> Sequence[Decision]:
        """Take an agent's report; a report that came before changes nothing."""
        if isinstance(report, messages.AgentLost):
            return list(self._take_loss(report, now))
        if not isinstance(report, messages.NumberedReport) or not self.is_next(report):
            return []
        return list(self._take_next(report, now))

    def is_next(self, report: messages.NumberedReport) -> bool:
        if report.number < self._numbers.get(report.rank, 0):
            self.repeated += 1
            return False
        self._numbers[report.rank] = report.number + 1
        return True

    def _take_next(self, report: messages.NumberedReport, now: float) -> Iterator[Decision]:
        match report:
            case messages.RankEvent(rank, _, HeldAt(number=number) as position) if (
                number == STOP and self.negotiation is not None
            ):
                self.negotiation.reply(rank, position, now)
                if self.negotiation.last_step is not None:
                    point_of = self.negotiation.stop_point_of
                    yield from (
                        messages.ToRank(held, messages.StopAt(point_of(held))) for held in self.negotiation.ranks
                    )
            case messages.RankEvent(rank, _, event):
                self._take_event(rank, event, now)
                yield event
            case messages.RankExited():
                yield from self._take_exit(report, now)

    def _take_event(self, rank: int, event: Event, now: float) -> None:
        self.connected.add(rank)
        if isinstance(event, Failure) and not event.lost_connection:
            self._failure = self._failure or "failed"
        if not isinstance(event, StateChange):
            return
        if event.state == "running":
            self.begun.add(rank)
        if event.state == "stopping" and self.negotiation is not None:
            self.negotiation.stopped.add(rank)
            self.stopped_at = event.detail if self.stopped_at is None else self.stopped_at
        if event.state in OVER:
            self.reported[rank], self.states[rank] = event.time, event.state
            # after a stop request to all, those that have stopped wait for those that still save
            if event.state == "failed" or (event.state == "stopped" and self.negotiation is None):
                self._fail(now)

    def _take_exit(self, report: messages.RankExited, now: float) -> Iterator[Decision]:
        rank, time = report.rank, report.time
        self.exit_codes[rank] = report.code
        if not report.killed:
            # it had ended before it could be killed
            self.killed.discard(rank)
        if rank in self.reported:
            return
        self.reported[rank] = time
        self._failure = self._failure or "died"
        self._fail(now)
        state: State = "stopped" if report.killed else "failed"
        yield StateChange(rank, state, time, "ended with the others" if report.killed else f"exit code {report.code}")

    def _take_loss(self, report: messages.AgentLost, now: float) -> Iterator[Decision]:
        self.lost = self.lost or report.reason
        self.lost_ranks.update(report.ranks)
        if self._is_all_lost:
            return
        # the others may still report what they saw of it
        self._failure = self._failure or "node_lost"
        self._fail(now)
        for rank in report.ranks:
            if rank not in self.reported:
                self.reported[rank], self.states[rank] = report.time, "failed"
                yield StateChange(rank, "failed", report.time, report.reason)

    def _fail(self, now: float) -> None:
        if self._failed_at is None:
            self._failed_at = now

    def advance(self, now: float) -> Sequence[Decision]:
        """Decide what is due now; to be called some times a second."""
        return list(self._advance(now))

    def _advance(self, now: float) -> Iterator[Decision]:
        if self.phase == "running":
            yield from self._watch(now)
        if self.phase == "ending" and (self.all_reported or now >= self._until or self.requested_stop == "kill"):
            cause = "kill" if self.requested_stop == "kill" else self.cause or "failed"
            yield from self._leave(cause, now, is_killed=not self.all_reported)
        if self.phase == "leaving":
            if len(self.exit_codes.keys() | self.lost_ranks) == self.size:
                self.phase = "over"
            if self._is_all_lost or (self.phase == "leaving" and now > self._until):
                yield self._kill()

    def _watch(self, now: float) -> Iterator[Decision]:
        """Until every rank has returned, or there is a reason to end them."""
        failure = None if self._failed_at is None else self._failure or "failed"
        if self.all_reported:
            yield from self._leave(self.requested_stop or failure or "returned", now)
            return
        if self.requested_stop == "finish" and self.negotiation is None and self.begun:
            yield from self._request_hold(now)
        # one that has not begun makes no step after which it could stop
        is_stopped = self.requested_stop is not None and (self.requested_stop != "finish" or not self.begun)
        if is_stopped or (self.negotiation is not None and self.negotiation.needs_force(self.reported, now)):
            yield from self._end_within(self.requested_stop or "finish", self._stop_grace_period, now)
        elif self.deadline is not None and now > self.deadline:
            yield from self._leave("timed_out", now, is_killed=True)
        elif self._is_all_lost or self.is_deadlocked:
            yield from self._leave("workers_lost" if self._is_all_lost else "deadlocked", now, is_killed=True)
        elif self._failed_at is not None and failure is not None:
            # others have their time to report why
            timeout = _SETTLE if self._failure is not None else _SETTLE_WITHOUT_CAUSE
            if now - self._failed_at > timeout:
                yield from self._end_within(failure, _END_AFTER_FAILURE, now)

    def _request_hold(self, now: float) -> Iterator[Decision]:
        """Have every rank that runs wait at the end of its step, and reply with its position; one that still starts can't."""
        ranks = tuple(rank for rank in range(self.size) if rank not in self.reported)
        self.negotiation = StopNegotiation(ranks, self._stop_grace_period, now)
        for rank in ranks:
            if rank in self.connected:
                yield messages.ToRank(rank, messages.HoldAtStep(rank, STOP))
            else:
                self.negotiation.reply(rank, None, now)

    def _end_within(self, cause: EndCause, seconds: float, now: float) -> Iterator[Decision]:
        """Interrupt those that run; those that are still there after some seconds are killed."""
        self.phase, self.cause, self._until = "ending", cause, now + seconds
        # on request, only those that have begun: one that still loads modules, or its payload, has nothing to end cleanly
        begun = set(self.begun if self.requested_stop is not None else self.connected)
        # the others have not begun anything, and may not be listening yet
        others = set(range(self.size)) - begun
        self.killed.update(others)
        for number, ranks in ((signal.SIGINT, begun), (signal.SIGKILL, others)):
            if ranks:
                yield messages.SignalRanks(int(number), tuple(sorted(ranks)))

    def _leave(self, cause: EndCause, now: float, *, is_killed: bool = False) -> Iterator[Decision]:
        """Let the processes end, where they are not killed."""
        self.phase, self.cause, self._until = "leaving", cause, now + _PARTING
        if is_killed:
            yield self._kill()
        yield messages.ReleaseRanks(tuple(range(self.size)))

    def _kill(self) -> messages.Message:
        self.killed.update(set(range(self.size)) - self.exit_codes.keys())
        return messages.KillGroup()
