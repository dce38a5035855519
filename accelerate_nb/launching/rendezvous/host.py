"""The node that hosts a rendezvous: it waits for the others, compares what they run, and gives each its rank."""

from __future__ import annotations

import select
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from accelerate_nb.errors import AccelerateNbError, LaunchError
from accelerate_nb.launching.node_agent.node_facts import facts_of_this_node
from accelerate_nb.launching.node_agent.node_network import NodeNetwork
from accelerate_nb.launching.nodes.peer_reach import of_all
from accelerate_nb.launching.nodes.version_table import check_versions
from accelerate_nb.launching.planning.placement import Placement
from accelerate_nb.launching.rendezvous.join_requests import JoiningNode, JoinRequests
from accelerate_nb.launching.rendezvous.node_checks import WaitingNode, check_nodes, clock_offset_of
from accelerate_nb.launching.rendezvous.peers import Peer, WaitNotice, node_name
from accelerate_nb.launching.rendezvous.settings import RendezvousSettings
from accelerate_nb.transport.messages import (
    HEARTBEAT_INTERVAL,
    Heartbeat,
    NodeFacts,
    RunJoined,
    RunRefused,
)

# Told to a node that comes when there is no place for it.
ALL_HAVE_COME = "all nodes of this run have come already"


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
        self._requests = JoinRequests(settings, placement.kind)
        self._joined: dict[int, JoiningNode] = {}
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
        watched = [self._listener, *self._requests.sockets, *(node.sock for node in self._joined.values())]
        left = HEARTBEAT_INTERVAL if self._last_call is None else self._last_call - time.monotonic()
        readable = select.select(watched, (), (), min(max(left, 0.0), HEARTBEAT_INTERVAL))[0]
        if self._listener in readable:
            self._requests.accept(self._listener)
        for rank in [rank for rank, node in self._joined.items() if node.sock in readable]:
            # it says nothing before it is answered: it has gone, or is none
            self._drop(rank)
        for sock in [sock for sock in self._requests.sockets if sock in readable]:
            if (node := self._requests.read(sock)) is not None:
                self._take(node)
        self._requests.refuse_expired()
        for node in self._joined.values():
            node.channel.try_send(Heartbeat())

    def _take(self, node: JoiningNode) -> None:
        """Have a node take part, unless another one has its rank."""
        wanted = node.request.node_rank
        if wanted in self._joined:
            reason = f"node_rank={wanted} was given, and {self._name(wanted)} has joined as that already. Pass another on each node"
            node.refuse(reason)
            return
        self._joined[wanted if wanted is not None else self._free_ranks()[0]] = node
        check_versions(self._facts, dict(self._facts_of_peers()))

    def _free_ranks(self) -> list[int]:
        return [rank for rank in range(1, self._settings.nodes) if rank not in self._joined]

    def _facts_of_peers(self) -> Iterator[tuple[str, NodeFacts]]:
        for rank, node in sorted(self._joined.items()):
            yield self._name(rank), node.facts

    def _name(self, rank: int) -> str:
        return node_name(rank, self._joined[rank].facts)

    def _missing(self) -> str:
        if self._settings.node_rank is None:
            return f"{len(self._free_ranks())} more"
        return " and ".join(f"node {rank}" for rank in self._free_ranks())

    def _missing_text(self) -> str:
        there = ", ".join([node_name(0, self._facts), *map(self._name, sorted(self._joined))])
        refused = f", and {self._requests.refused} others were refused" if self._requests.refused else ""
        refused += f": {'; '.join(self._requests.objections)}" if self._requests.objections else ""
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
        run, ranks = uuid.uuid4().hex, range(1, len(came) + 1)
        names = (node_name(0, self._facts), *map(self._name, ranks))
        sizes = (self._placement.size, *(self._joined[rank].request.processes for rank in ranks))
        address = str(self._joined[1].sock.getsockname()[0]) if came else _own_address(self._listener)
        channels = [self._joined[rank].channel for rank in ranks]
        waiting = [WaitingNode(channel, name) for channel, name in zip(channels, names[1:], strict=True)]
        if waiting:
            check_nodes(address, names[0], waiting)
        clock_offsets = of_all(clock_offset_of, waiting) if waiting else ()
        peers = tuple(map(Peer, ranks, channels, names[1:], sizes[1:], clock_offsets))
        for peer in peers:
            peer.channel.try_send(RunJoined(run, peer.number, names, sizes, self._max_restarts))
        self._requests.refuse_all(ALL_HAVE_COME)
        failing.pop_all()
        return HostedRendezvous(run, self._listener, address, peers, names)

    def _drop(self, rank: int) -> None:
        self._joined.pop(rank).channel.close()

    def _refuse_all(self, reason: str) -> None:
        for node in self._joined.values():
            node.channel.try_send(RunRefused(reason))

    def _close_all(self) -> None:
        for rank in list(self._joined):
            self._drop(rank)
        self._requests.refuse_all("")


def _own_address(listener: socket.socket) -> str:
    """An address of this node at which a socket listens, and others can come later."""
    address = str(listener.getsockname()[0])
    return NodeNetwork().address if address in {"0.0.0.0", "::"} else address
