"""The connections at the endpoint of a rendezvous that ask to take part in its run."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import NamedTuple

from accelerate_nb.errors import ProtocolError
from accelerate_nb.events.terminal_lines import plain_name
from accelerate_nb.launching.rendezvous.peers import print_notice
from accelerate_nb.launching.rendezvous.pending_connections import PendingConnections
from accelerate_nb.launching.rendezvous.settings import RendezvousSettings
from accelerate_nb.launching.rendezvous.unproven_connection import UnprovenConnection
from accelerate_nb.transport.channel import Channel
from accelerate_nb.transport.messages import (
    JoinRun,
    NodeFacts,
    RunRefused,
)


class JoiningNode(NamedTuple):
    """A node that has asked to take part: its socket, the channel over it, what it asked for, and the facts of its machine."""

    sock: socket.socket
    channel: Channel
    request: JoinRun
    facts: NodeFacts

    def refuse(self, reason: str) -> None:
        """Tell it why there is no run for it, and leave it."""
        self.channel.try_send(RunRefused(reason))
        self.channel.close()


# Strangers may send any number of them.
_MOST_OBJECTIONS = 5


class JoinRequests:
    """
    Reads what strangers send, and refuses what can't be of this run: with the reason where it may be a node of another.

    >>> requests = JoinRequests(settings, kind="cpu")
    >>> requests.accept(listener)
    >>> node = requests.read(sock)
    """

    def __init__(self, settings: RendezvousSettings, kind: str) -> None:
        self._settings, self._kind = settings, kind
        self._strangers = PendingConnections(UnprovenConnection)
        # why nodes were refused whose settings are others
        self.objections: list[str] = []

    @property
    def sockets(self) -> list[socket.socket]:
        """The connections that have not said yet what they are."""
        return list(self._strangers.states)

    @property
    def refused(self) -> int:
        """The number of connections that were refused."""
        return self._strangers.refused

    def accept(self, listener: socket.socket) -> None:
        """Take in one connection."""
        self._strangers.accept(listener)

    def read(self, sock: socket.socket) -> JoiningNode | None:
        """The node at the other end, whose settings are those of this run, once it has asked; others are refused."""
        try:
            request = self._strangers.states[sock].read()
        except ProtocolError as error:
            self.refuse(sock, "another release of accelerate_nb runs on node 0" if error.refusal == "version" else "")
            return None
        except OSError:
            self.refuse(sock, "")
            return None
        if request is None:
            return None
        if not isinstance(request, JoinRun):
            self.refuse(sock, "")
            return None
        if reason := self._objection(request):
            self._note(reason)
            self.refuse(sock, reason)
            return None
        return JoiningNode(sock, self._strangers.take(sock).channel, request, request.facts)

    def _note(self, reason: str) -> None:
        """Say once on this node, too, why another one was refused: it may be one that is waited for."""
        objection = plain_name(reason.replace("this node", "that node"))
        if objection not in self.objections and len(self.objections) < _MOST_OBJECTIONS:
            self.objections.append(objection)
            print_notice(f"a node came, and was refused: {objection}")

    def refuse(self, sock: socket.socket, reason: str) -> None:
        """Close a connection that is no node of this run, with the reason where it may be one of another."""
        if reason:
            self._strangers.states[sock].channel.try_send(RunRefused(reason))
        self._strangers.refuse(sock)

    def refuse_all(self, reason: str) -> None:
        """Close those that have not said yet what they are."""
        for sock in self.sockets:
            self.refuse(sock, reason)

    def refuse_expired(self) -> None:
        """Close those that have said nothing for too long."""
        self._strangers.refuse_expired()

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
        if request.kind != self._kind:
            return (
                f"this node computes on {request.kind}, and node 0 on {self._kind}: ranks of one run compute on devices of one "
                "kind. Pass cpu=True on all nodes"
            )
        if request.node_rank is not None and not 0 < request.node_rank < settings.nodes:
            return f"node_rank={request.node_rank} was given, and nodes beside node 0 are 1 to {settings.nodes - 1}"
        return ""


def _backend(node_rank: int | None) -> str:
    return "c10d" if node_rank is None else "static"
