"""The state machine of a worker group decides from messages and the time alone, whatever an agent reports."""

import signal
from collections import Counter

import pytest

from accelerate_nb.events.event_types import Event, Failure, HeldAt, LogLine, State, StateChange
from accelerate_nb.launching.worker_group import Decision, WorkerGroup
from accelerate_nb.rank.step_hold import STOP, StopPoint
from accelerate_nb.transport import messages

KILL, INTERRUPT = int(signal.SIGKILL), int(signal.SIGINT)
GRACE = 2.0
INTERRUPT_ALL, RELEASE = messages.SignalRanks(INTERRUPT, (0, 1)), messages.ReleaseRanks((0, 1))
KILL_ALL = [messages.KillGroup(), RELEASE]


class ScriptedAgent:
    """An agent without processes: it reports what a test has it report, and keeps what the group decides."""

    def __init__(self, size: int = 2, deadline: float | None = None) -> None:
        self.group = WorkerGroup(size, GRACE, deadline=deadline)
        self.now = 0.0
        self.decided: list[Decision | LogLine] = []
        self._numbers: Counter[int] = Counter()

    def number(self, rank: int) -> int:
        self._numbers[rank] += 1
        return self._numbers[rank] - 1

    def report(self, message: messages.Message) -> None:
        if isinstance(message, messages.RankOutput):
            # the runner hands lines on by itself
            self.decided += message.lines if self.group.is_next(message) else ()
        else:
            self.decided += self.group.take(message, self.now)

    def event(self, rank: int, event: Event) -> None:
        self.report(messages.RankEvent(rank, self.number(rank), event))

    def state(self, state: State, *ranks: int, detail: str = "") -> None:
        for rank in ranks:
            self.event(rank, StateChange(rank, state, 100.0 + self.now, detail))

    def failure(self, rank: int, *, lost_connection: bool = False) -> None:
        self.event(rank, Failure(rank, "KeyError", "'a'", "", 100.0, lost_connection=lost_connection))
        self.state("failed", rank)

    def exits(self, code: int, *ranks: int, killed: bool = False) -> None:
        for rank in ranks:
            self.report(messages.RankExited(rank, self.number(rank), code, 100.0 + self.now, killed=killed))

    def holds(self, rank: int, steps: int | None) -> None:
        self.report(messages.RankEvent(rank, self.number(rank), HeldAt(rank, STOP, steps, 0.1)))

    def after(self, seconds: float) -> list[Decision]:
        """What is decided when so much time has passed."""
        self.now += seconds
        self.decided += self.group.advance(self.now)
        found = [decision for decision in self.decided if isinstance(decision, messages.Message)]
        self.decided = [decision for decision in self.decided if not isinstance(decision, messages.Message)]
        return found

    def is_over(self) -> bool:
        return self.after(0.0) == [] and self.group.phase == "over"


@pytest.fixture
def agent() -> ScriptedAgent:
    made = ScriptedAgent()
    made.state("starting", 0, 1)
    made.state("running", 0, 1)
    assert made.after(0.0) == []
    return made


def test_a_group_whose_ranks_return_is_released_and_over_when_their_processes_have_ended(agent: ScriptedAgent) -> None:
    agent.state("finished", 0)
    assert agent.after(1000.0) == []
    agent.state("finished", 1)
    assert agent.after(0.0) == [RELEASE]
    agent.exits(0, 0)
    assert agent.after(0.0) == []
    assert agent.group.phase == "leaving"
    agent.exits(0, 1)
    assert agent.is_over()
    assert agent.group.states == {0: "finished", 1: "finished"}


def test_processes_that_do_not_leave_are_killed(agent: ScriptedAgent) -> None:
    agent.state("finished", 0, 1)
    assert agent.after(0.0) == [RELEASE]
    assert agent.after(2.0) == []
    assert agent.after(1.0) == [messages.KillGroup()]
    agent.exits(-KILL, 0, 1, killed=True)
    assert agent.is_over()


def test_after_a_failure_the_others_have_their_time_to_fail_by_themselves(agent: ScriptedAgent) -> None:
    agent.failure(0)
    assert agent.after(0.1) == []
    assert agent.after(0.1) == [INTERRUPT_ALL]
    assert agent.after(0.5) == []
    assert agent.after(0.2) == KILL_ALL
    agent.exits(1, 0)
    agent.exits(-KILL, 1, killed=True)
    assert agent.is_over()
    assert 1 in agent.group.killed


@pytest.mark.parametrize("is_before", [True, False])
def test_a_kill_from_outside_before_that_of_the_group_stays_one_whenever_it_is_reported(
    agent: ScriptedAgent, is_before: bool
) -> None:
    if is_before:
        agent.exits(-KILL, 1)
    else:
        agent.failure(0, lost_connection=True)
    assert agent.after(0.2 if is_before else 1.1) == [INTERRUPT_ALL]
    assert agent.after(0.7) == KILL_ALL
    if not is_before:
        agent.exits(-KILL, 1)
    agent.exits(-KILL, 0, killed=True)
    assert agent.after(0.0) == []
    assert agent.group.killed == {0}


def test_a_rank_that_only_lost_its_connection_waits_longer_for_the_cause(agent: ScriptedAgent) -> None:
    agent.failure(1, lost_connection=True)
    assert agent.after(0.9) == []
    agent.failure(0)
    assert agent.after(0.0) == [RELEASE]


def test_a_process_that_dies_is_a_failure_with_its_exit_code(agent: ScriptedAgent) -> None:
    agent.exits(-int(signal.SIGSEGV), 1)
    assert StateChange(1, "failed", 100.0, "exit code -11") in agent.decided
    assert agent.after(0.2) == [INTERRUPT_ALL]
    agent.state("stopped", 0)
    assert agent.after(0.0) == [RELEASE]


def test_who_is_killed_by_the_group_has_stopped_and_not_failed(agent: ScriptedAgent) -> None:
    agent.group.stop("kill")
    assert agent.after(0.0) == [INTERRUPT_ALL, *KILL_ALL]
    agent.exits(-KILL, 0, 1, killed=True)
    assert StateChange(0, "stopped", 100.0, "ended with the others") in agent.decided
    assert agent.is_over()


@pytest.mark.parametrize("is_repeated", [False, True])
def test_an_interrupt_gives_the_ranks_their_time_and_then_kills_them_a_second_stop_at_once(
    agent: ScriptedAgent, is_repeated: bool
) -> None:
    agent.group.stop("interrupt")
    assert agent.after(0.0) == [INTERRUPT_ALL]
    agent.state("stopped", 0)
    assert agent.after(GRACE - 0.1) == []
    if is_repeated:
        agent.group.stop("kill")
    assert agent.after(0.0 if is_repeated else 0.2) == KILL_ALL


@pytest.mark.parametrize("begun", [(), (0,)])
def test_ranks_that_have_not_begun_are_killed_and_not_interrupted(begun: tuple[int, ...]) -> None:
    agent = ScriptedAgent(size=3)
    agent.state("starting", 0, 1)
    agent.state("running", *begun)
    agent.group.stop("interrupt" if begun else "finish")
    others = tuple(rank for rank in range(3) if rank not in begun)
    interrupts = [messages.SignalRanks(INTERRUPT, begun)] if begun else []
    assert agent.after(0.0) == [*interrupts, messages.SignalRanks(KILL, others)]


def test_a_graceful_stop_has_two_steps_hold_and_then_the_last_step_of_all(agent: ScriptedAgent) -> None:
    agent.group.stop("finish")
    assert agent.after(0.0) == [messages.ToRank(rank, messages.HoldAtStep(rank, STOP)) for rank in (0, 1)]
    agent.holds(0, 7)
    assert agent.after(0.0) == []
    agent.holds(1, 8)
    assert agent.after(0.0) == [messages.ToRank(rank, messages.StopAt(StopPoint(9, True))) for rank in (0, 1)]
    agent.state("stopping", 0, 1, detail="after step 9")
    # who has come to the last step may save for as long as it takes
    assert agent.after(1000.0) == []
    agent.state("stopped", 0)
    assert agent.after(1000.0) == []
    agent.state("stopped", 1)
    assert agent.after(0.0) == [RELEASE]
    assert agent.group.stopped_at == "after step 9"


@pytest.mark.parametrize("steps", [None, 7])
def test_a_rank_that_comes_to_no_boundary_is_interrupted(agent: ScriptedAgent, steps: int | None) -> None:
    agent.group.stop("finish")
    assert agent.after(0.0) == [messages.ToRank(rank, messages.HoldAtStep(rank, STOP)) for rank in (0, 1)]
    agent.holds(0, steps)
    assert agent.after(0.0 if steps is None else GRACE + 0.1) == [INTERRUPT_ALL]


def test_a_group_whose_time_is_over_is_killed_and_reports_it() -> None:
    agent = ScriptedAgent(deadline=5.0)
    agent.state("running", 0, 1)
    assert agent.after(5.0) == []
    assert agent.group.cause is None
    assert agent.after(0.1) == KILL_ALL
    assert agent.group.cause == "timed_out"


@pytest.mark.parametrize("lost", [[(0, 1)], [(0,), (1,)]])
@pytest.mark.parametrize("have_returned", [False, True])
def test_lost_agents_end_the_group_at_once(
    agent: ScriptedAgent, lost: list[tuple[int, ...]], have_returned: bool
) -> None:
    if have_returned:
        agent.state("finished", 0, 1)
        assert agent.after(0.0) == [RELEASE]
    for number, ranks in enumerate(lost, 1):
        agent.report(messages.AgentLost(ranks, f"it ended with code {number}", 100.0))
    release = [] if have_returned else KILL_ALL
    assert agent.after(0.0) == [*release, messages.KillGroup()]
    assert agent.group.phase == "over"
    assert agent.group.lost == "it ended with code 1"


def test_of_several_agents_one_that_is_lost_fails_its_ranks_and_ends_the_others() -> None:
    agent = ScriptedAgent(4)
    agent.state("running", 0, 1, 2, 3)
    agent.decided.clear()
    agent.report(messages.AgentLost((2, 3), "its connection has ended", 100.0))
    assert agent.decided == [StateChange(rank, "failed", 100.0, "its connection has ended") for rank in (2, 3)]
    assert agent.after(0.0) == []
    (interrupt,) = agent.after(0.2)
    assert isinstance(interrupt, messages.SignalRanks)
    assert {0, 1} <= set(interrupt.ranks)
    agent.state("stopped", 0, 1)
    assert agent.after(0.0) == [messages.ReleaseRanks((0, 1, 2, 3))]
    agent.exits(0, 0, 1)
    assert agent.is_over()
    assert agent.group.lost == "its connection has ended"


def test_every_event_and_line_is_handed_on_once_and_in_order(agent: ScriptedAgent) -> None:
    agent.decided.clear()
    lines = tuple(LogLine(0, "stdout", text, 100.0) for text in "abc")
    first = messages.RankOutput(0, agent.number(0), b"", lines[:2])
    second = messages.RankOutput(0, agent.number(0), b"", lines[2:])
    for report in (first, first, second, first):
        agent.report(report)
    assert agent.decided == list(lines)
    assert agent.group.repeated == 2
    # the last of several outputs that were put together is the number of them all
    agent.number(0)
    agent.state("finished", 0)
    assert agent.group.states[0] == "finished"


def test_nothing_is_pending_while_ranks_run(agent: ScriptedAgent) -> None:
    assert not agent.group.is_pending
    agent.group.stop("finish")
    assert agent.group.is_pending
    other = ScriptedAgent()
    other.failure(0)
    assert other.group.is_pending
