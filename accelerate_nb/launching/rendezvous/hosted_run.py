"""A run of several nodes in the process of node 0, which conducts it for all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from accelerate_nb.errors import HangError, LaunchError
from accelerate_nb.events.model import Event, Failure, NodeRanks, Restart, State, StateChange
from accelerate_nb.launching.engines.base import Engine
from accelerate_nb.launching.group_runner import GroupRunner
from accelerate_nb.launching.launched_run import LaunchedRun
from accelerate_nb.launching.node_agent.agent import NodeAgent, Report
from accelerate_nb.launching.node_agent.agent_loop import AgentLoop
from accelerate_nb.launching.node_agent.channel_reader import ChannelReader
from accelerate_nb.launching.node_agent.remote_agent import NodeLink, RemoteAgent
from accelerate_nb.launching.nodes.attempt_nodes import ranks_of_nodes
from accelerate_nb.launching.nodes.spare_nodes import NodeRoster, leave_out
from accelerate_nb.launching.planning.placement import Placement
from accelerate_nb.launching.planning.plan import LaunchPlan
from accelerate_nb.launching.rendezvous.host import HostedRendezvous
from accelerate_nb.launching.rendezvous.launched_nodes import LaunchedNodes
from accelerate_nb.launching.rendezvous.peers import SILENCE_LIMIT, HeartbeatThread, Peer
from accelerate_nb.launching.run_context import RunContext, Stop
from accelerate_nb.transport.protocol.agent_messages import RankOutcome, RankTaskReply, StartWorkers
from accelerate_nb.transport.protocol.channel import Channel, ReceivedMessage
from accelerate_nb.transport.protocol.node_messages import EndRun, RequestStop, RunEvent, StartGroup
from accelerate_nb.transport.rank_info import MasterAddress

# How many failures the other nodes are told of; the first cause is among them.
_MOST_FAILURES = 64


class PeerAgent(RemoteAgent):
    """
    The ranks of another node, whose own process starts them with its own function.

    No code goes there, and no outcome is taken from there, which would have to be unpickled: values stay on their node.
    """

    has_outcomes = False
    takes_sockets = False

    def __init__(
        self,
        channel: Channel,
        loop: AgentLoop,
        report: Report,
        node: NodeLink,
        *,
        sizes: tuple[int, ...],
        on_stop: Callable[[Stop], None],
    ) -> None:
        super().__init__(channel, loop, report, node)
        self._sizes, self._on_stop = sizes, on_stop

    def start(self, request: StartWorkers, descriptors: Sequence[int]) -> None:
        """Have the node start its ranks."""
        self._begin(request.ranks)
        rank_info = request.processes[0][0].rank_info
        self._channel.try_send(StartGroup(rank_info.restart_count, rank_info.node_rank, self._sizes))

    def _take(self, received: ReceivedMessage) -> bool:
        match received.message:
            case RequestStop(how):
                self._on_stop(how)
                return False
            case RankOutcome() | RankTaskReply():
                self._channel.refuse(received)
                return False
        return super()._take(received)


class HostedNodes(LaunchedNodes):
    """The nodes of a run that this process conducts, itself the first of them; after a loss it goes on with `min_nodes` at least."""

    def __init__(self, rendezvous: HostedRendezvous, local: Placement, min_nodes: int | None = None) -> None:
        super().__init__(local, 0, rendezvous.address)
        self._rendezvous, self._peers, self._min_nodes = rendezvous, rendezvous.peers, min_nodes
        self.run = rendezvous.run
        self.max_restarts: int | None = None
        self.names = rendezvous.names
        self.sizes = (local.size, *(peer.size for peer in rendezvous.peers))
        # the nodes that were lost, and are not left out
        self._lost: list[str] = []
        self._reader = ChannelReader()
        self._heartbeats = HeartbeatThread([peer.channel for peer in rendezvous.peers])
        self._heartbeats.start()
        self._on_stop: Callable[[Stop], None] = lambda _: None

    def run_kind(self, **arguments: Any) -> HostNodeRun:
        """The run of these nodes."""
        run = HostNodeRun(self, **arguments)
        self._on_stop = run.request_stop
        return run

    @property
    def node_ranks(self) -> list[NodeRanks]:
        """The ranks of each node."""
        return ranks_of_nodes(self.names, self.sizes)

    @property
    def may_be_fewer(self) -> bool:
        """Whether the run may go on with fewer nodes, and with fewer ranks."""
        return self._min_nodes is not None

    def replace_lost(self, ranks: Collection[int]) -> str:
        """Go on without the nodes of these ranks, where there may be fewer; returns a sentence, which is empty where nothing changes."""
        roster = NodeRoster(self.names, self.sizes)
        lost = roster.nodes_of(ranks)
        change = None if 0 in lost else leave_out(roster, lost, self._min_nodes)
        if change is None:
            return ""
        for node in lost:
            self._peers[node - 1].channel.close()
        self._peers = tuple(peer for node, peer in enumerate(self._peers, 1) if node not in lost)
        self.names, self.sizes = change.roster.names, change.roster.sizes
        self._lost.clear()
        return change.text

    def worker_group(self, plan: LaunchPlan, engine: Engine, run_context: RunContext, number: int) -> GroupRunner:
        """The runner of one attempt; raises `LaunchError` where a node was lost in a former one."""
        if self._lost:
            raise LaunchError(
                f"The run was to start again, and {' and '.join(self._lost)} was lost. Launch it again on each node."
            )
        plan = replace(plan, size=sum(self.sizes), node_sizes=self.sizes)
        peers = (
            partial(PeerAgent, peer.channel, node=self._link(peer), sizes=self.sizes, on_stop=self._stop)
            for peer in self._peers
        )
        master = MasterAddress(self._rendezvous.address, self._rendezvous.listener.getsockname()[1])
        return GroupRunner(
            plan, [partial(NodeAgent, engine), *peers], run_context, number, master, store=self._rendezvous.listener
        )

    def share(self, event: Event) -> None:
        """Have the other nodes know of what happened elsewhere."""
        first = self.sizes[0]
        for peer in self._peers:
            if _concerns(event, range(first, first + peer.size)):
                peer.channel.try_send(RunEvent(event))
            first += peer.size

    def end(self, message: EndRun) -> None:
        """End the run on the other nodes, and leave them."""
        self._heartbeats.stop()
        for peer in self._peers:
            peer.channel.try_send(message)
        self.close()

    def close(self) -> None:
        """Leave the other nodes, for which that is the end of their ranks."""
        self._heartbeats.stop()
        self._rendezvous.listener.close()
        for peer in self._peers:
            peer.channel.close()

    def _link(self, peer: Peer) -> NodeLink:
        def release(is_usable: bool) -> None:
            if not is_usable:
                self._lost.append(peer.name)

        return NodeLink(peer.name, peer.clock_offset, release=release, silence_limit=SILENCE_LIMIT, reader=self._reader)

    def _stop(self, how: Stop) -> None:
        self._on_stop(how)


class HostNodeRun(LaunchedRun):
    """A run of several nodes, conducted here."""

    unreached = "in a run that is launched on each machine. Launch it from one notebook."

    def __init__(self, nodes: HostedNodes, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._nodes, inner = nodes, self._run_context.on_event

        def on_event(event: Event) -> None:
            nodes.share(event)
            inner(event)

        self._run_context.on_event = on_event

    def _report_end(self, state: State, detail: str) -> None:
        failures = [item.failure for item in self._rank_results if item.failure is not None]
        # the causes before those that only followed
        failures.sort(key=lambda failure: (failure.ended_by_us, failure.lost_connection, failure.time))
        error = self._error
        is_hang = isinstance(error, HangError)
        is_of_workers = error is None or (bool(failures) and not is_hang and not isinstance(error, LaunchError))
        self._nodes.end(
            EndRun(
                state=state if state in {"finished", "failed"} else "stopped",
                detail=detail,
                stopped_at=self.stopped_at,
                failures=tuple(failures[:_MOST_FAILURES]),
                error_kind="" if is_of_workers else "hang" if is_hang else "launch",
                error="" if is_of_workers else str(error),
            )
        )


def _concerns(event: Event, ranks: range) -> bool:
    """Whether a node with these ranks is to know of an event: it knows what happened on its own."""
    match event:
        case StateChange(None, state):
            return state == "stopping"
        case StateChange(rank) | Failure(rank):
            return rank not in ranks
    return isinstance(event, (Restart, NodeRanks))
