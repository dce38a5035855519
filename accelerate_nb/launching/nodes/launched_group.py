"""One attempt of a run that is launched on each of its nodes: this node's ranks, with what the others report of theirs."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from msgspec import structs

from accelerate_nb.events.model import Failure, HeldAt, StateChange, StepProfile
from accelerate_nb.failures.hang_report import StackSnapshot
from accelerate_nb.failures.rank_result import RankResult
from accelerate_nb.launching.engines.children import Engine
from accelerate_nb.launching.group_runner import GroupRunner
from accelerate_nb.launching.node_agent.agent import AgentLoop, NodeAgent, Report
from accelerate_nb.launching.nodes.launched_nodes import LaunchedNodes
from accelerate_nb.launching.planning.placement import LaunchPlan
from accelerate_nb.launching.run_context import RunContext, Stop
from accelerate_nb.launching.worker_group import Decision
from accelerate_nb.rank.step_hold import STOP
from accelerate_nb.transport.messages import (
    AgentLost,
    ChangeKnobAfter,
    HoldAtStep,
    KillGroup,
    Message,
    ProfileSteps,
    RankEvent,
    RankExited,
    ReleaseRanks,
    RunTimedOut,
    StartWorkers,
    StopAt,
    ToRank,
)

# The events of ranks that concern other nodes, and what is passed on to a rank elsewhere: nothing that would run code there.
_SHARED_EVENTS = (StateChange, Failure, HeldAt, StepProfile)
_PASSED_ON = (HoldAtStep, ChangeKnobAfter, ProfileSteps)
# The number of an end that is not waited for: what comes later counts no more.
_LAST = 1 << 60


class LaunchedGroupRunner(GroupRunner):
    """
    Runs this node's part of a plan.

    Its group has all ranks: those elsewhere as their nodes report them. So every node comes to the same decisions by itself: who failed
    first, after which step all stop, when all have returned.
    """

    def __init__(self, plan: LaunchPlan, engine: Engine, run_context: RunContext, nodes: LaunchedNodes) -> None:
        self._nodes = nodes
        # what came before this group was there to take it
        self._early: list[Message] = []
        plan = replace(plan, size=sum(nodes.sizes), node_sizes=nodes.sizes)
        # a node that has come late does not count its attempts itself
        number, place = nodes.joined.attempt, nodes.joined.node_rank
        agents = [
            self._agent_here(engine, number) if node == place else partial(RanksElsewhere, self)
            for node in range(len(nodes.sizes))
        ]
        master, store = nodes.master
        super().__init__(plan, agents, run_context, number, master, store=store)

    def follow(self) -> tuple[RankResult, ...]:
        """Run the workers to their end; returns a result for every rank of the run, without values for those of other nodes."""
        self._nodes.wake = self._loop.wake
        try:
            return super().follow()
        finally:
            self._nodes.wake = lambda: None

    def stop(self, how: Stop) -> None:
        """Request the end on all nodes."""
        self._nodes.stop(how)
        super().stop(how)

    def has_exited(self, rank: int) -> bool:
        """Whether a rank's end was reported."""
        return rank in self._group.exit_codes

    def reports(self) -> Iterator[Message]:
        """What other nodes have reported, as far as this one is ready to take it."""
        waiting, self._early = self._early, []
        for message in (*waiting, *self._nodes.reports(self._number)):
            match message:
                case RankEvent(event=HeldAt(number=number)) if number == STOP and self._group.negotiation is None:
                    # its node knows already that all are to stop
                    self._early.append(message)
                case AgentLost(ranks) if all(rank in self._group.reported for rank in ranks):
                    # it left after its ranks had ended
                    continue
                case RankEvent(rank) | RankExited(rank) if rank in self._group.lost_ranks:
                    # its node goes on without the others for a moment
                    continue
                case RunTimedOut():
                    self._run_context.deadline = self._group.deadline = time.monotonic()
                case ToRank(rank, content):
                    if isinstance(content, _PASSED_ON) and rank in self._nodes.ranks_here:
                        self.send(rank, self._in_own_folder(content))
                case _:
                    yield message

    def pass_on(self, message: Message) -> None:
        """Have a rank elsewhere take a message."""
        self._nodes.post(message, self._number)

    def _agent_here(self, engine: Engine, number: int) -> Callable[[AgentLoop, Report], NodeAgent]:
        def made(loop: AgentLoop, report: Report) -> NodeAgent:
            def shared(message: Message, descriptors: Sequence[int]) -> None:
                is_shared = isinstance(message, (RankExited, AgentLost))
                if is_shared or (isinstance(message, RankEvent) and isinstance(message.event, _SHARED_EVENTS)):
                    self._nodes.post(message, number)
                report(message, descriptors)

            return NodeAgent(engine, loop, shared)

        return made

    def _in_own_folder(self, content: Any) -> Any:
        folder = str(self._run_context.record.folder)
        return structs.replace(content, folder=folder) if isinstance(content, ProfileSteps) else content

    def _carry_out(self, decisions: Iterable[Decision]) -> None:
        if self._group.has_timed_out and self.timed_out is None:
            self._nodes.post(RunTimedOut(), self._number)
        super()._carry_out(decisions)

    def _end_deadlock(self, snapshot: StackSnapshot) -> None:
        """End the group, unless ranks elsewhere, whose stacks are not known here, may still be at work."""
        elsewhere = set(range(self._plan.size)) - set(self._nodes.ranks_here)
        if elsewhere <= self._group.reported.keys():
            super()._end_deadlock(snapshot)


class RanksElsewhere:
    """The ranks of another node, of which is known what their node reports; their ends are not waited for."""

    takes_sockets = has_outcomes = False

    def __init__(self, runner: LaunchedGroupRunner, loop: AgentLoop, report: Report) -> None:
        self._runner, self._report = runner, report
        self.ranks: tuple[int, ...] = ()
        self._code: int | None = None

    def start(self, request: StartWorkers, descriptors: Sequence[int]) -> None:
        """Know the ranks."""
        self.ranks = request.ranks

    def tick(self, now: float, timeout: float) -> float:
        """Report what has come, and the ends once this node's ranks are to end."""
        for message in self._runner.reports():
            self._report(message, ())
        if self._code is not None:
            for rank in self.ranks:
                if not self._runner.has_exited(rank):
                    self._report(RankExited(rank, _LAST, self._code, time.time(), killed=self._code < 0), ())
        return timeout

    def carry_out(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Pass on what is for a rank; the rest is decided there, too."""
        match message:
            case ToRank(_, content) if isinstance(content, StopAt) or (
                isinstance(content, HoldAtStep) and content.number == STOP
            ):
                # so decides its own node, too
                pass
            case ToRank():
                self._runner.pass_on(message)
            case KillGroup():
                self._code = -int(signal.SIGKILL)
            case ReleaseRanks() if self._code is None:
                self._code = 0

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """None are known."""
        return {}

    def collectives(self, ranks: Sequence[int]) -> dict[int, Any]:
        """None are known."""
        return {}

    def drain(self) -> None:
        """Nothing is left."""

    def close(self) -> None:
        """Nothing is held."""
