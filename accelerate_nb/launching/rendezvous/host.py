"""The node that hosts a rendezvous: it waits for the others, compares what they run, and gives each its rank."""

from __future__ import annotations

import select
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from accelerate_nb.errors import AccelerateNbError, LaunchError, ProtocolError
from accelerate_nb.launching.node_agent.node_facts import facts_of_this_node
from accelerate_nb.launching.nodes.version_table import check_versions
from accelerate_nb.launching.planning.placement import Placement
from accelerate_nb.launching.rendezvous.node_checks import WaitingNode, check_nodes
from accelerate_nb.launching.rendezvous.peers import Peer, WaitNotice
from accelerate_nb.launching.rendezvous.pending_connections import PendingConnections
from accelerate_nb.launching.rendezvous.settings import RendezvousSettings
from accelerate_nb.launching.rendezvous.unproven_connection import UnprovenConnection
from accelerate_nb.transport.protocol.agent_messages import HEARTBEAT_INTERVAL, Heartbeat, NodeFacts
from accelerate_nb.transport.protocol.channel import Channel
from accelerate_nb.transport.protocol.node_messages import JoinRun, RunJoined, RunRefused
from accelerate_nb.transport.rank_info import LOOPBACK


@dataclass(frozen=True, slots=True)
class HostedRendezvous:
    """The nodes have come: the listening socket, this node's address for the others, the peers, which are nodes 1, 2, ..., and the names of all."""

    run: str
    listener: socket.socket
    address: str
    peers: tuple[Peer, ...]
    names: tuple[str, ...]


class RendezvousHost:
    """
    Waits at a listening socket until all nodes have come, or as many as are needed and for a while no others.

    >>> RendezvousHost(settings, listener, placement, max_restarts=0).wait()
    """

    def __init__(
        self, settings: RendezvousSettings, listener: socket.socket, placement: Placement, max_restarts: int
    ) -> None:
        self._settings, self._listener, self._placement = settings, listener, placement
        self._max_restarts = max_restarts
        self._strangers = PendingConnections(UnprovenConnection)
        self._joined: dict[int, tuple[Channel, JoinRun]] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._facts = facts_of_this_node(settings.host)
        # when it begins without those that are not needed
        self._last_call: float | None = None

    def wait(self) -> HostedRendezvous:
        """
        Wait for all nodes.

        Raises `LaunchError` where they don't come in time, or run other versions; those that came get the reason, too.
        """
        notice, deadline = WaitNotice(), time.monotonic() + self._settings.timeout
        with ExitStack() as failing:
            failing.callback(self._listener.close)
            failing.callback(self._close_all)
            try:
                while not self._is_complete(time.monotonic()):
                    if self._last_call is None and time.monotonic() > deadline:
                        raise LaunchError(self._missing_text())
                    most = self._settings.timeout if self._last_call is None else self._settings.last_call
                    notice.say(
                        f"{len(self._joined) + 1} of {self._settings.nodes} nodes are there; waiting at {self._settings.endpoint} for "
                        f"{self._missing()}, up to {most:g} s"
                    )
                    self._wait_once()
                return self._complete(failing)
            except (AccelerateNbError, KeyboardInterrupt) as error:
                self._refuse_all(str(error) or "node 0 was interrupted while it waited for other nodes. Launch again")
                raise

    # ------------------------------------------------------------------------------------------------------- waiting

    def _is_complete(self, now: float) -> bool:
        """Whether nobody else is waited for."""
        count, settings = len(self._joined) + 1, self._settings
        if count < (settings.min_nodes or settings.nodes):
            self._last_call = None
        elif self._last_call is None:
            self._last_call = now + settings.last_call
        return count == settings.nodes or (self._last_call is not None and now >= self._last_call)

    def _wait_once(self) -> None:
        """Take what comes within a moment."""
        watched = [self._listener, *self._strangers.states, *self._sockets.values()]
        left = HEARTBEAT_INTERVAL if self._last_call is None else self._last_call - time.monotonic()
        readable = select.select(watched, (), (), min(max(left, 0.0), HEARTBEAT_INTERVAL))[0]
        if self._listener in readable:
            self._strangers.accept(self._listener)
        for rank in [rank for rank, sock in self._sockets.items() if sock in readable]:
            # it says nothing before it is answered: it has gone, or is none
            self._drop(rank)
        for sock in [sock for sock in self._strangers.states if sock in readable]:
            self._read_stranger(sock)
        self._strangers.refuse_expired()
        for channel, _ in self._joined.values():
            channel.try_send(Heartbeat())

    def _read_stranger(self, sock: socket.socket) -> None:
        try:
            request = self._strangers.states[sock].read()
        except ProtocolError as error:
            self._refuse(sock, "another release of accelerate_nb runs on node 0" if error.refusal == "version" else "")
            return
        except OSError:
            self._refuse(sock, "")
            return
        if request is None:
            return
        if not isinstance(request, JoinRun) or not isinstance(request.facts, NodeFacts):
            self._refuse(sock, "")
            return
        if reason := self._objection(request):
            self._refuse(sock, reason)
            return
        channel = self._strangers.take(sock).channel
        rank = request.node_rank if request.node_rank is not None else self._free_ranks()[0]
        self._joined[rank], self._sockets[rank] = (channel, request), sock
        check_versions(self._facts, dict(self._facts_of_peers()))

    def _objection(self, request: JoinRun) -> str:
        """Why a node can't be one of this run; empty where it can."""
        settings = self._settings
        expected: Mapping[str, tuple[object, object]] = {
            "rdzv_id": (request.run_id, settings.run_id),
            "num_nodes": (request.nodes, settings.nodes),
            "rdzv_backend": (_backend(request.node_rank), _backend(settings.node_rank)),
        }
        for name, (theirs, ours) in expected.items():
            if theirs != ours:
                return f"{name}={theirs!r} was given on this node, and {name}={ours!r} on node 0. Pass the same on all nodes"
        if request.kind != self._placement.kind:
            return (
                f"this node computes on {request.kind}, and node 0 on {self._placement.kind}: ranks of one run compute on devices of one "
                "kind. Pass cpu=True on all nodes"
            )
        if request.node_rank is not None and not 0 < request.node_rank < settings.nodes:
            return f"node_rank={request.node_rank} was given, and nodes beside node 0 are 1 to {settings.nodes - 1}"
        if request.node_rank in self._joined:
            return (
                f"node_rank={request.node_rank} was given, and {self._name(request.node_rank)} has joined as that already. Pass another on each "
                "node"
            )
        return ""

    def _free_ranks(self) -> list[int]:
        return [rank for rank in range(1, self._settings.nodes) if rank not in self._joined]

    def _facts_of_peers(self) -> Iterator[tuple[str, NodeFacts]]:
        for rank, (_, request) in sorted(self._joined.items()):
            assert isinstance(request.facts, NodeFacts)
            yield self._name(rank), request.facts

    def _name(self, rank: int) -> str:
        facts = self._joined[rank][1].facts
        return f"node {rank} on {facts.host}" if isinstance(facts, NodeFacts) else f"node {rank}"

    def _missing(self) -> str:
        if self._settings.node_rank is None:
            return f"{len(self._free_ranks())} more"
        return " and ".join(f"node {rank}" for rank in self._free_ranks())

    def _missing_text(self) -> str:
        there = ", ".join([f"node 0 on {self._facts.host}", *map(self._name, sorted(self._joined))])
        refused = f", and {self._strangers.refused} others were refused" if self._strangers.refused else ""
        return (
            f"A run of {self._settings.nodes} nodes was requested, and after {self._settings.timeout:g} s only {len(self._joined) + 1} had come to "
            f"{self._settings.endpoint} ({there}{refused}): {self._missing()} did not. To go on, {self._settings.advice}."
        )

    # --------------------------------------------------------------------------------------------------------- ending

    def _complete(self, failing: ExitStack) -> HostedRendezvous:
        """Check the nodes, and answer them; from now on everything is the caller's."""
        came = sorted(self._joined)
        # where fewer came than could, one that went may have left a gap
        self._joined = {rank: self._joined[former] for rank, former in enumerate(came, 1)}
        self._sockets = {rank: self._sockets[former] for rank, former in enumerate(came, 1)}
        run, ranks = uuid.uuid4().hex[:12], range(1, len(came) + 1)
        names = (f"node 0 on {self._facts.host}", *map(self._name, ranks))
        sizes = (self._placement.size, *(self._joined[rank][1].processes for rank in ranks))
        address = str(self._sockets[1].getsockname()[0]) if came else _own_address(self._listener)
        channels = [self._joined[rank][0] for rank in ranks]
        waiting = [WaitingNode(channel, name) for channel, name in zip(channels, names[1:], strict=True)]
        clock_offsets = check_nodes(address, names[0], waiting) if waiting else ()
        peers = tuple(map(Peer, channels, names[1:], sizes[1:], clock_offsets))
        for rank, peer in enumerate(peers, 1):
            peer.channel.try_send(RunJoined(run, rank, names, sizes, self._max_restarts))
        for sock in list(self._strangers.states):
            self._refuse(sock, "all nodes of this run have come already")
        failing.pop_all()
        return HostedRendezvous(run, self._listener, address, peers, names)

    def _refuse(self, sock: socket.socket, reason: str) -> None:
        """Close a connection that is no node of this run, with the reason where it may be one of another."""
        if reason:
            self._strangers.states[sock].channel.try_send(RunRefused(reason))
        self._strangers.refuse(sock)

    def _drop(self, rank: int) -> None:
        self._joined.pop(rank)[0].close()
        del self._sockets[rank]

    def _refuse_all(self, reason: str) -> None:
        for channel, _ in self._joined.values():
            channel.try_send(RunRefused(reason))

    def _close_all(self) -> None:
        for rank in list(self._joined):
            self._drop(rank)
        self._strangers.close()


def _own_address(listener: socket.socket) -> str:
    """An address of this node at which a socket listens."""
    address = str(listener.getsockname()[0])
    return LOOPBACK if address in {"0.0.0.0", "::"} else address


def _backend(node_rank: int | None) -> str:
    return "c10d" if node_rank is None else "static"
