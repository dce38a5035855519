"""One group of workers on a node that joined a run: its agent is here, and its decisions are node 0's."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from accelerate_nb.errors import LaunchError
from accelerate_nb.failures.rank_result import RankResult
from accelerate_nb.launching.engines.children import Engine
from accelerate_nb.launching.group_runner import GroupRunner
from accelerate_nb.launching.node_agent.agent import AgentLoop, NodeAgent, Report
from accelerate_nb.launching.node_agent.agent_process import NodeSampler
from accelerate_nb.launching.planning.plan import LaunchPlan
from accelerate_nb.launching.rendezvous.host_link import HostLink
from accelerate_nb.launching.run_context import RunContext, Stop
from accelerate_nb.launching.worker_group import Decision, WorkerGroup
from accelerate_nb.transport.messages import (
    AgentLost,
    CloseGroup,
    GroupClosed,
    KillGroup,
    Message,
    ProfileSteps,
    RequestStop,
    RunEvent,
    SignalRanks,
    StartWorkers,
    ToRank,
)
from accelerate_nb.transport.rank_info import MasterAddress


class FollowingGroup(WorkerGroup):
    """
    A group whose decisions are made elsewhere: it keeps what its ranks report, and passes on what `link` orders.

    Traces of profiles go into `folder`.

    >>> FollowingGroup(4, link, folder).advance(now=0.0)
    [SignalRanks(number=2, ranks=(0, 1, 2, 3))]
    """

    def __init__(self, size: int, link: HostLink, folder: Path) -> None:
        super().__init__(size, stop_grace_period=0.0)
        self._link, self._folder = link, folder

    @property
    def is_pending(self) -> bool:
        """Never: what becomes due wakes the loop."""
        return False

    def stop(self, how: Stop) -> None:
        """Request the end of the whole run, from any thread; a kill holds here at once."""
        self._link.send(RequestStop(how))
        if how == "kill":
            self._link.put(KillGroup())

    def advance(self, now: float) -> Sequence[Decision]:
        """What is ordered now."""
        decisions: list[Decision] = []
        for order in self._link.orders():
            match order:
                case CloseGroup():
                    # what follows is for the next group
                    self.phase = "over"
                    return decisions
                case AgentLost(_, reason):
                    self.lost, self.phase = reason, "over"
                    return [*decisions, self._kill()]
                case RunEvent(event):
                    decisions.append(event)
                case KillGroup():
                    decisions.append(self._kill())
                case SignalRanks(number, ranks):
                    if number == signal.SIGKILL:
                        self._killed.update(ranks)
                    decisions.append(order)
                case ToRank(rank, ProfileSteps() as request):
                    decisions.append(ToRank(rank, structs.replace(request, folder=str(self._folder))))
                case _:
                    decisions.append(order)
        return decisions


class RanksElsewhere:
    """The ranks of another node, of which nothing is known here but what node 0 sends."""

    takes_sockets = has_outcomes = False

    def __init__(self, loop: AgentLoop, report: Report) -> None:
        self.ranks: tuple[int, ...] = ()

    def start(self, request: StartWorkers, descriptors: Sequence[int]) -> None:
        """Know the ranks."""
        self.ranks = request.ranks

    def tick(self, now: float, timeout: float) -> float:
        """Nothing is ever due."""
        return timeout

    def carry_out(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Their own node has it carried out."""

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


class JoinedGroupRunner(GroupRunner):
    """Runs this node's part of a plan, and has node 0 know of it."""

    def __init__(
        self,
        plan: LaunchPlan,
        engine: Engine,
        run_context: RunContext,
        number: int,
        *,
        link: HostLink,
        node_rank: int,
        master: MasterAddress,
    ) -> None:
        self._link = link

        def agent_here(loop: AgentLoop, report: Report) -> NodeAgent:
            link.agent = self._agent_here = NodeAgent(engine, loop, link.sharing(report))
            return self._agent_here

        agents = [agent_here if node == node_rank else RanksElsewhere for node in range(len(plan.node_sizes))]
        super().__init__(
            plan, agents, run_context, number, master, group=FollowingGroup(plan.size, link, run_context.record.folder)
        )
        self._number_of_node = node_rank
        self._specs = [spec for process in plan.specs(master, number)[node_rank] for spec in process]

    def follow(self) -> tuple[RankResult, ...]:
        """Run the workers to their end; returns a result for every rank of the run, which is empty for those of other nodes."""
        self._link.wake = self._loop.wake
        sampler = NodeSampler(self._link.send, self._specs, lambda: self._agent_here.pids)
        try:
            return super().follow()
        except BaseException as error:
            # node 0 would wait for the ends of ranks that nobody follows any more
            reason = str(error) if isinstance(error, (LaunchError, OSError)) else repr(error)
            self._link.send(AgentLost(self._agents[self._number_of_node].ranks, reason, time.time()))
            raise
        finally:
            self._link.wake = lambda: None
            self._link.agent = None
            sampler.close()
            self._link.send(GroupClosed())

    def _rank_result(self, rank: int) -> RankResult:
        if not self._agent_of[rank].has_outcomes:
            return RankResult(rank)
        return super()._rank_result(rank)
