"""The check that the nodes of a run can connect to each other, before anything starts on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from accelerate_nb.errors import LaunchError
from accelerate_nb.launching.nodes.node_connection import REPLY_TIMEOUT
from accelerate_nb.transport.channel import Reply
from accelerate_nb.transport.messages import (
    ConnectToPeers,
    ListenToPeers,
    Message,
    NetworkAddress,
    PeerEndpoint,
    PeersReached,
)

Result = TypeVar("Result")

# How long a node may take to connect to another one, in seconds.
_CONNECT_TIMEOUT = 4.0
# Each node tries to connect to that of rank 0, and to so many that follow it.
_NEIGHBOURS = 8


class RequestedNode(Protocol):
    """A node that carries out requests."""

    @property
    def name(self) -> str:
        """Its name for people."""

    def request(self, message: Message, reply_class: type[Reply], timeout: float) -> Reply:
        """Send a message, and wait for its reply; raises `LaunchError` where none comes."""


def endpoint_of(node: RequestedNode, request: ListenToPeers) -> PeerEndpoint:
    """Have a node listen to the others; raises `LaunchError` where it can't."""
    endpoint = node.request(request, PeerEndpoint, REPLY_TIMEOUT)
    if endpoint.error:
        raise LaunchError(
            f"A run on {node.name} was requested, and it can't listen to the other nodes: {endpoint.error}. "
            "Leave use_port out, or set GLOO_SOCKET_IFNAME there to the interface between the nodes."
        )
    return endpoint


def check_reach(nodes: Sequence[RequestedNode], endpoints: Sequence[PeerEndpoint]) -> None:
    """
    Check that each node can connect to others, of which each listens at its endpoint: their collectives have to, at ports of any number.

    Raises `LaunchError` with the port and the interface of each that can't.
    """

    def errors(index: int) -> list[str]:
        following = ((index + step) % len(endpoints) for step in range(1, min(_NEIGHBOURS + 1, len(endpoints))))
        targets = list(dict.fromkeys(other for other in (0, *following) if other != index))
        request = ConnectToPeers(
            tuple(NetworkAddress(endpoints[other].host, endpoints[other].port) for other in targets), _CONNECT_TIMEOUT
        )
        reply = nodes[index].request(request, PeersReached, _CONNECT_TIMEOUT + REPLY_TIMEOUT)
        return [
            f"{nodes[index].name} can't connect to port {endpoint.port} of {nodes[target].name} ({endpoint.host}, {endpoint.interface}): "
            f"{reply.errors[str(place)]}"
            for place, target in enumerate(targets)
            for endpoint in endpoints[target : target + 1]
            if str(place) in reply.errors
        ]

    found = [error for reply in of_all(errors, range(len(nodes))) for error in reply]
    if found:
        lines = "\n".join(f"- {error}" for error in found)
        raise LaunchError(
            f"A run on {len(nodes)} nodes was requested, whose ranks have to connect to each other at ports of any number, and:\n"
            f"{lines}\nOpen those ports between the nodes, or set GLOO_SOCKET_IFNAME there to an interface that reaches the others."
        )


def of_all(call: Callable[..., Result], items: Sequence[object]) -> list[Result]:
    """The results of a call for each item, made at the same time; raises the first error, once all have ended."""
    if len(items) == 1:
        return [call(items[0])]
    with ThreadPoolExecutor(len(items), "accelerate_nb node") as threads:
        return list(threads.map(call, items))
