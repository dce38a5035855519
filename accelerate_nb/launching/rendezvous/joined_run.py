"""A run of several nodes in the process of a node that joined it: it starts its own ranks, and node 0 decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from accelerate_nb.errors import HangError, LaunchError
from accelerate_nb.events.model import Restart, State
from accelerate_nb.failures.rank_result import RankResult
from accelerate_nb.failures.worker_error import stopped_error, worker_error
from accelerate_nb.launching.engines.children import Engine
from accelerate_nb.launching.launched_run import LaunchedRun
from accelerate_nb.launching.planning.placement import Placement
from accelerate_nb.launching.planning.plan import LaunchPlan
from accelerate_nb.launching.rendezvous.host_link import HostLink
from accelerate_nb.launching.rendezvous.join import JoinedRendezvous
from accelerate_nb.launching.rendezvous.joined_group import JoinedGroupRunner
from accelerate_nb.launching.rendezvous.launched_nodes import LaunchedNodes
from accelerate_nb.launching.run_context import RunContext
from accelerate_nb.transport.messages import (
    AgentLost,
    EndRun,
    Message,
    RunEvent,
    StartGroup,
)
from accelerate_nb.transport.rank_info import MasterAddress

JoinedKind = TypeVar("JoinedKind", bound="JoinedNodeRun")


class JoinedNodes(LaunchedNodes):
    """The nodes of a run that node 0 conducts; this one joined it."""

    def __init__(self, rendezvous: JoinedRendezvous, local: Placement) -> None:
        answer = rendezvous.answer
        super().__init__(local, sum(answer.sizes[: answer.node_rank]), rendezvous.address)
        # of node 0, where the ranks find each other; it comes with each attempt
        self._rendezvous, self._port = rendezvous, 0
        self.run, self.sizes, self.max_restarts = answer.run, answer.sizes, answer.max_restarts
        self.names, self._node_rank = answer.names, answer.node_rank
        self._link = HostLink(rendezvous.channel, answer.names[0], rendezvous.address)
        self._link.start()

    def run_kind(self, **arguments: Any) -> JoinedNodeRun:
        """The run of these nodes."""
        return self.run_of(JoinedNodeRun, **arguments)

    def run_of(self, kind: Callable[..., JoinedKind], **arguments: Any) -> JoinedKind:
        """The run of these nodes, of a kind; node 0 decides about restarts, and when the time is over."""
        return kind(nodes=self, link=self._link, **arguments)

    def take_place(self, order: StartGroup) -> None:
        """Take the place of this node among those that take part in an attempt."""
        self._node_rank, self.sizes, self._port = order.node_rank, order.sizes, order.port
        self.first_rank = sum(order.sizes[: order.node_rank])

    def worker_group(self, plan: LaunchPlan, engine: Engine, run_context: RunContext, number: int) -> JoinedGroupRunner:
        """The runner of one attempt."""
        return JoinedGroupRunner(
            replace(plan, size=sum(self.sizes), node_sizes=self.sizes),
            engine,
            run_context,
            number,
            link=self._link,
            node_rank=self._node_rank,
            master=MasterAddress(self._rendezvous.host, self._port),
        )

    @property
    def name(self) -> str:
        """The name of this node for people."""
        return self.names[self._node_rank]

    def join_session(self, on_message: Callable[[Message], None]) -> None:
        """Have a session here take what node 0 sends to those of all nodes."""
        self._link.on_session_message = on_message

    def report(self, message: Message) -> None:
        """Report what has happened in this node's session to node 0."""
        self._link.send(message)

    def close(self) -> None:
        """Leave the run, which ends it for all nodes."""
        self._link.close()


class JoinedNodeRun(LaunchedRun):
    """A run that node 0 conducts, with some of its ranks here."""

    unreached = "on a node that joined its run, which node 0 conducts. Request it there."

    def __init__(self, nodes: JoinedNodes, link: HostLink, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._nodes, self._link = nodes, link
        self.session_nodes = nodes
        self.main_rank = nodes.first_rank
        self._run_context.deadline = None
        self._run_context.hang_warning_after = 0.0
        self._end: EndRun | None = None

    def _worker_groups(self) -> tuple[RankResult, ...]:
        results = tuple(RankResult(rank) for rank in range(len(self.view.ranks)))
        while True:
            match self._link.next_order():
                case StartGroup(number) as order:
                    self._nodes.take_place(order)
                    self.main_rank, self.ranks_here = self._nodes.first_rank, self._nodes.ranks_here
                    group, results = self._run_once(number)
                    if group.lost is not None:
                        self._error = self._error_of(group, results)
                        return results
                case RunEvent(event):
                    if isinstance(event, Restart):
                        self._run_context.record.put_logs_aside(event.attempt - 1)
                        self._keep_status("running")
                    self._run_context.take(event)
                case EndRun() as end:
                    self._end = end
                    return self._ended(end, results)
                case AgentLost(_, reason):
                    self._error = LaunchError(f"The workers were lost: {reason}. They were ended; launch again.")
                    return results

    def _ended(self, end: EndRun, results: tuple[RankResult, ...]) -> tuple[RankResult, ...]:
        """The results with the failures of ranks elsewhere; sets the run's error."""
        elsewhere = {failure.rank: failure for failure in end.failures}
        merged = tuple(
            item if item.rank in self._nodes.ranks_here else replace(item, failure=elsewhere.get(item.rank))
            for item in results
        )
        failures = [item.failure for item in merged if item.failure is not None]
        if end.error_kind == "hang":
            self._error = HangError()
            self._error.message = end.error
        elif end.error_kind:
            self._error = LaunchError(end.error)
        elif failures and end.state == "stopped" and all(failure.ended_by_us for failure in failures):
            self._error = stopped_error(end.stopped_at, merged, self.folder)
        elif failures:
            self._error = worker_error(merged, self.folder)
        return merged

    def _end_state(self) -> tuple[State, str]:
        if self._end is None:
            return super()._end_state()
        self.stopped_at = self._end.stopped_at
        return self._end.state, self._end.detail

    def _report_end(self, state: State, detail: str) -> None:
        self._link.close()
