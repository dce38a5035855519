"""Before anything starts on the nodes of a run: what is said while they are waited for, and whether they fit and can connect to each other."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from accelerate_nb.errors import LaunchError
from accelerate_nb.reports.text_format import aligned
from accelerate_nb.transport.channel import Reply
from accelerate_nb.transport.messages import (
    ConnectToPeers,
    ListenToPeers,
    Message,
    NetworkAddress,
    NodeFacts,
    PeerEndpoint,
    PeersReached,
)

# What is said of a wait, comes after so many seconds.
_QUIET_WAIT = 2.0


class WaitNotice:
    """Says on standard error what is waited for, once that takes some seconds, and again whenever it changes."""

    def __init__(self) -> None:
        self._began, self._said = time.monotonic(), ""

    def say(self, text: str) -> None:
        """Say it, unless it was said."""
        if time.monotonic() - self._began > _QUIET_WAIT and text != self._said:
            self._said = text
            print_notice(text)


def print_notice(text: str) -> None:
    """Write what is waited for on standard error, at once."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


Result = TypeVar("Result")

# How long an agent may take to reply that has replied before, in seconds.
REPLY_TIMEOUT = 8.0
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


_HEADINGS = ("", "Python", "torch", "accelerate_nb")


def check_versions(here: NodeFacts, nodes: Mapping[str, NodeFacts]) -> None:
    """
    Check that all nodes run what this process runs, as far as functions and tensors are to travel between them.

    That is Python up to its minor version, torch without the name of its build, and this package. Raises `LaunchError` with a
    table of all, in which those that differ are marked.
    """
    expected = _comparable(here)
    differing = {name for name, facts in nodes.items() if _comparable(facts) != expected}
    if differing:
        rows = [("this process", here, False), *((name, facts, name in differing) for name, facts in nodes.items())]
        raise LaunchError(
            f"A run on {', '.join(nodes)} was requested, and {', '.join(sorted(differing))} "
            f"{'has' if len(differing) == 1 else 'have'} other versions than this process:\n\n{_table(rows)}\n\n"
            "Install the same versions there, or name a Python that has them as node_python."
        )


def _comparable(facts: NodeFacts) -> tuple[str, ...]:
    python = ".".join(facts.python.split(".")[:2])
    return python, facts.torch.partition("+")[0], facts.accelerate_nb


def _table(rows: Sequence[tuple[str, NodeFacts, bool]]) -> str:
    cells = [_HEADINGS]
    for name, facts, differs in rows:
        versions = (facts.python, facts.torch or "not installed", facts.accelerate_nb)
        cells.append((f"{name} (differs)" if differs else name, *versions))
    return "\n".join(aligned(cells))
