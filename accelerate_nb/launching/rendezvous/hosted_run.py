"""A run of several nodes in the process of node 0, which conducts it for all of them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from accelerate_nb.errors import HangError, LaunchError
from accelerate_nb.events.model import Event, Failure, NodeRanks, Restart, State, StateChange
from accelerate_nb.launching.engines.children import Engine
from accelerate_nb.launching.group_runner import GroupRunner
from accelerate_nb.launching.launched_run import LaunchedRun
from accelerate_nb.launching.node_agent.agent import NodeAgent
from accelerate_nb.launching.node_agent.node_facts import facts_of_this_node
from accelerate_nb.launching.node_agent.remote_agent import ChannelReader, NodeLink
from accelerate_nb.launching.nodes.attempt_nodes import ranks_of_nodes
from accelerate_nb.launching.nodes.spare_nodes import NodeRoster, came_text, leave_out
from accelerate_nb.launching.nodes.version_table import check_versions
from accelerate_nb.launching.planning.placement import Placement
from accelerate_nb.launching.planning.plan import LaunchPlan
from accelerate_nb.launching.rendezvous.host import ALL_HAVE_COME, HostedRendezvous
from accelerate_nb.launching.rendezvous.join_requests import JoiningNode, JoinRequests
from accelerate_nb.launching.rendezvous.late_nodes import LateNodes
from accelerate_nb.launching.rendezvous.launched_nodes import LaunchedNodes
from accelerate_nb.launching.rendezvous.node_checks import WaitingNode, check_nodes, clock_offset_of
from accelerate_nb.launching.rendezvous.peer_agent import PeerAgent
from accelerate_nb.launching.rendezvous.peers import SILENCE_LIMIT, HeartbeatThread, Peer, node_name
from accelerate_nb.launching.rendezvous.session_conductor import SessionConductor
from accelerate_nb.launching.rendezvous.settings import RendezvousSettings
from accelerate_nb.launching.run_context import RunContext, Stop
from accelerate_nb.transport.messages import (
    EndRun,
    Message,
    RunEvent,
    RunJoined,
)
from accelerate_nb.transport.rank_info import MasterAddress

# How many failures the other nodes are told of; the first cause is among them.
_MOST_FAILURES = 64


HostedKind = TypeVar("HostedKind", bound="HostNodeRun")


class HostedNodes(LaunchedNodes):
    """
    The nodes of a run that this process conducts, itself the first of them.

    Where `settings` have the fewest nodes, it goes on with as many after a loss, and takes in others that come, unless there is a reason
    why their number is `fixed`.
    """

    def __init__(
        self,
        rendezvous: HostedRendezvous,
        local: Placement,
        settings: RendezvousSettings,
        max_restarts: int,
        fixed: str = "",
    ) -> None:
        super().__init__(local, 0, rendezvous.address)
        self._rendezvous, self._peers, self._settings, self._fixed = rendezvous, rendezvous.peers, settings, fixed
        self.run = rendezvous.run
        self.max_restarts = max_restarts
        self.names = rendezvous.names
        self.sizes = (local.size, *(peer.size for peer in rendezvous.peers))
        # the nodes that were lost, and are not left out
        self._lost: list[str] = []
        # those that came for this attempt
        self._new: frozenset[str] = frozenset()
        self._reader = ChannelReader()
        self._heartbeats = HeartbeatThread([peer.channel for peer in rendezvous.peers])
        self._heartbeats.start()
        self._running: dict[str, PeerAgent] = {}
        self._on_stop: Callable[[Stop], None] = lambda _: None
        self.on_newcomer: Callable[[], None] = lambda: None
        self._late: LateNodes | None = None
        self._conductor: SessionConductor | None = None
        # where the ranks of an attempt find each other, if others may come to the rendezvous
        self._store: socket.socket | None = None
        if self.may_be_fewer:
            requests = JoinRequests(settings, local.kind)
            self._late = LateNodes(self, requests, rendezvous.listener, self._heartbeats)
            self._late.start()

    def run_kind(self, **arguments: Any) -> HostNodeRun:
        """The run of these nodes."""
        return self.run_of(HostNodeRun, **arguments)

    def run_of(self, kind: Callable[..., HostedKind], **arguments: Any) -> HostedKind:
        """The run of these nodes, of a kind."""
        run = kind(nodes=self, **arguments)
        self._on_stop, self.on_newcomer = run.request_stop, run.stop_for_newcomers
        return run

    @property
    def node_ranks(self) -> list[NodeRanks]:
        """The ranks of each node."""
        return ranks_of_nodes(self.names, self.sizes)

    @property
    def may_be_fewer(self) -> bool:
        """Whether the run may go on with fewer nodes, and with fewer ranks."""
        return self._settings.min_nodes is not None

    def replace_lost(self, ranks: Collection[int]) -> str:
        """Go on without the nodes of these ranks, where there may be fewer; returns a sentence, which is empty where nothing changes."""
        roster = NodeRoster(self.names, self.sizes)
        lost = roster.nodes_of(ranks)
        change = None if 0 in lost else leave_out(roster, lost, self._settings.min_nodes)
        if change is None:
            return ""
        for node in lost:
            self._peers[node - 1].channel.close()
        self._peers = tuple(peer for node, peer in enumerate(self._peers, 1) if node not in lost)
        self.names, self.sizes = change.roster.names, change.roster.sizes
        self._lost.clear()
        return change.text

    @property
    def has_newcomers(self) -> bool:
        """Whether nodes have come that wait for the next attempt."""
        return self._late is not None and self._late.are_there

    def check_newcomer(self, node: JoiningNode, waiting: int) -> float | None:
        """Check a node that has come, beside so many that wait; see `GrowingRun`."""
        if self._fixed or len(self.names) + waiting >= self._settings.nodes:
            raise LaunchError(self._fixed or ALL_HAVE_COME)
        peers = [self._running.get(peer.name) for peer in self._peers]
        others = [peer for peer in peers if peer is not None]
        if len(others) < len(peers):
            return None
        newcomer = WaitingNode(node.channel, f"the new node on {node.facts.host}")
        check_versions(facts_of_this_node(self._address), {newcomer.name: node.facts})
        try:
            check_nodes(self._address, self.names[0], [*others, newcomer])
            return clock_offset_of(newcomer)
        except LaunchError:
            if others != [self._running.get(peer.name) for peer in self._peers]:
                # others were lost meanwhile, or their ranks have ended
                return None
            raise

    def are_new(self, ranks: Collection[int]) -> bool:
        """Whether all nodes of these ranks have come for this attempt."""
        return self._new.issuperset(self.names[node] for node in NodeRoster(self.names, self.sizes).nodes_of(ranks))

    def take_newcomers(self) -> str:
        """Go on with the nodes that have come, too; returns a sentence, which is empty where there are none."""
        came = [] if self._late is None else self._late.take()
        self._new = frozenset()
        if not came:
            return ""
        known = {peer.number for peer in self._peers}
        numbers = [number for number in range(1, self._settings.nodes) if number not in known]
        new = [
            Peer(number, node.channel, node_name(number, node.facts), node.request.processes, offset)
            for number, (node, offset) in zip(numbers, came, strict=False)
        ]
        for node, _ in came[len(numbers) :]:
            node.refuse(ALL_HAVE_COME)
        self._peers = tuple(sorted((*self._peers, *new), key=lambda peer: peer.number))
        self.names = (self.names[0], *(peer.name for peer in self._peers))
        self.sizes = (self.local.size, *(peer.size for peer in self._peers))
        for node_rank, peer in enumerate(self._peers, 1):
            if peer in new:
                peer.channel.try_send(RunJoined(self.run, node_rank, self.names, self.sizes, self.max_restarts))
        self._new = frozenset(peer.name for peer in new)
        return came_text([peer.name for peer in new], sum(self.sizes))

    def worker_group(self, plan: LaunchPlan, engine: Engine, run_context: RunContext, number: int) -> GroupRunner:
        """The runner of one attempt; raises `LaunchError` where a node was lost in a former one."""
        if self._lost:
            raise LaunchError(
                f"The run was to start again, and {' and '.join(self._lost)} was lost. Launch it again on each node."
            )
        plan = replace(plan, size=sum(self.sizes), node_sizes=self.sizes)
        store = self._listening_store()
        master = MasterAddress(self._address, store.getsockname()[1])
        peers = (
            partial(
                PeerAgent,
                peer.channel,
                node=self._link(peer),
                sizes=self.sizes,
                port=master.port,
                running=self._running,
                on_stop=self._stop,
                on_session_report=self._report_of,
            )
            for peer in self._peers
        )
        return GroupRunner(plan, [partial(NodeAgent, engine), *peers], run_context, number, master, store=store)

    def _listening_store(self) -> socket.socket:
        """The socket at which ranks find each other: that of the rendezvous, unless other nodes may still come there."""
        if self._late is None:
            return self._rendezvous.listener
        if self._store is not None:
            self._store.close()
        # on the interfaces of the rendezvous
        host, family = self._rendezvous.listener.getsockname()[0], self._rendezvous.listener.family
        self._store = socket.create_server((host, 0), family=family, backlog=4096)
        return self._store

    @property
    def name(self) -> str:
        """The name of this node for people."""
        return self.names[0]

    def join_session(self, on_message: Callable[[Message], None]) -> None:
        """Conduct the sessions of all nodes; the one here takes what all of them are to do."""
        self._conductor = SessionConductor([peer.channel for peer in self._peers], on_message)

    def report(self, message: Message) -> None:
        """Take what has happened in this node's session."""
        self._report_of(self.name, message)

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
        if self._conductor is not None:
            self._conductor.close()
        if self._late is not None:
            self._late.close()
        if self._store is not None:
            self._store.close()
        self._rendezvous.listener.close()
        for peer in self._peers:
            peer.channel.close()

    def _link(self, peer: Peer) -> NodeLink:
        def release(is_usable: bool) -> None:
            if not is_usable:
                self._lost.append(peer.name)

        return NodeLink(peer.name, peer.clock_offset, release=release, silence_limit=SILENCE_LIMIT, reader=self._reader)

    def _report_of(self, node: str, message: Message) -> None:
        if self._conductor is not None:
            self._conductor.take(node, message)

    def _stop(self, how: Stop) -> None:
        self._on_stop(how)


class HostNodeRun(LaunchedRun):
    """A run of several nodes, conducted here."""

    def __init__(self, nodes: HostedNodes, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._nodes, inner = nodes, self._run_context.on_event
        self.session_nodes = nodes

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
