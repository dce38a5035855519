"""The agents that this process has placed on nodes: they stay between runs, so that the next launch is warm."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial

from accelerate_nb.errors import LaunchError
from accelerate_nb.launching.node_agent.remote_agent import ChannelReader, NodeLink, RemoteAgent
from accelerate_nb.launching.nodes.node_connection import END_TIMEOUT, NodeConnection
from accelerate_nb.launching.nodes.node_engine import NodeEngine
from accelerate_nb.launching.nodes.peer_reach import check_reach, endpoint_of, of_all
from accelerate_nb.transport.messages import (
    ListenToPeers,
    PeerEndpoint,
)
from accelerate_nb.transport.rank_info import MasterAddress


@dataclass
class _NodePool:
    """The connections that no run uses at the moment, by their engine and node."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    idle: dict[tuple[NodeEngine, str], list[NodeConnection]] = field(default_factory=dict)

    def take(self, engine: NodeEngine, name: str) -> NodeConnection | None:
        """A connection that is not in use."""
        with self.lock:
            found = self.idle.get((engine, name))
            return found.pop() if found else None

    def put(self, connection: NodeConnection) -> None:
        """Keep a connection for the next run."""
        with self.lock:
            self.idle.setdefault((connection.engine, connection.name), []).append(connection)

    def take_all(self, engine: NodeEngine | None = None) -> list[NodeConnection]:
        """All connections that are not in use, or those of one engine."""
        with self.lock:
            keys = [key for key in self.idle if engine is None or key[0] == engine]
            return [connection for key in keys for connection in self.idle.pop(key)]


_pool: ContextVar[_NodePool] = ContextVar("accelerate_nb_nodes", default=_NodePool())  # noqa: B039 - one for all threads


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """The connections to the nodes of one worker group, in the order of nodes, and where their ranks find each other."""

    connections: tuple[NodeConnection, ...]
    master: MasterAddress
    # the name of the folder on each node for the whole logs of its ranks; without one they are sent here
    log_folder: str = ""

    @property
    def agents(self) -> list[partial[RemoteAgent]]:
        """The factories of the nodes' agents; each gives its connection back when it is closed."""
        reader = ChannelReader()
        return [
            partial(
                RemoteAgent,
                connection.channel,
                node=NodeLink(
                    name=connection.name,
                    clock_offset=connection.clock_offset,
                    inherits_environment=connection.engine.inherits_environment,
                    release=partial(release, connection),
                    log_folder=self.log_folder,
                    reader=reader,
                ),
            )
            for connection in self.connections
        ]


def lease(engine: NodeEngine, names: Sequence[str]) -> tuple[NodeConnection, ...]:
    """The connections to these nodes, the caller's until they are released; raises `LaunchError` where one can't be reached."""
    found: list[NodeConnection] = []
    try:
        _ = of_all(lambda name: found.append(_connection(engine, name)), names)
    except BaseException:
        for connection in found:
            release(connection, is_usable=True)
        raise
    # in the order of names, of which one may be there twice
    return tuple(found.pop(next(at for at, item in enumerate(found) if item.name == name)) for name in names)


def idle_nodes(engine: NodeEngine) -> list[str]:
    """The names of the nodes of an engine whose agent no run uses, and is still there."""
    found = _pool.get().take_all(engine)
    are_there = of_all(_is_there, found) if found else []
    names = []
    for connection, is_there in zip(found, are_there, strict=True):
        release(connection, is_there)
        names += [connection.name] if is_there else []
    return names


def release(connection: NodeConnection, is_usable: bool) -> None:
    """Give a connection back; one that is not usable any more is closed."""
    if is_usable and connection.is_usable:
        _pool.get().put(connection)
    else:
        connection.close(0.0)


def open_group(engine: NodeEngine, names: Sequence[str], port: int) -> NodeGroup:
    """
    The nodes of one worker group, with the rendezvous open on the first of them, at a port or, with 0, at any free one.

    Raises `LaunchError` where a node can't be reached, from here or from another node.
    """
    connections = lease(engine, names)
    try:
        endpoints = _listen(connections, port)
        _check_reach(connections, endpoints)
    except BaseException:
        for connection in connections:
            release(connection, is_usable=True)
        raise
    return NodeGroup(connections, MasterAddress(endpoints[0].host, endpoints[0].port))


def close_nodes() -> None:
    """End the agents that no run uses, all at the same time."""
    connections = _pool.get().take_all()
    for connection in connections:
        connection.request_end()
    deadline = time.monotonic() + END_TIMEOUT
    for connection in connections:
        connection.close(max(0.0, deadline - time.monotonic()))


atexit.register(close_nodes)


def _connection(engine: NodeEngine, name: str) -> NodeConnection:
    while (idle := _pool.get().take(engine, name)) is not None:
        try:
            idle.refresh()
        except LaunchError:
            # it has ended since the last run
            idle.close(0.0)
        else:
            return idle
    connection = NodeConnection(engine, name)
    try:
        connection.open()
    except BaseException:
        connection.close()
        raise
    return connection


def _is_there(connection: NodeConnection) -> bool:
    """Whether an agent still replies."""
    try:
        connection.refresh()
    except LaunchError:
        return False
    return True


def _listen(connections: Sequence[NodeConnection], port: int) -> list[PeerEndpoint]:
    """Have every node listen on the interface that routes to the others."""

    def listen(connection: NodeConnection) -> PeerEndpoint:
        peers = tuple(other.facts.address for other in connections if other is not connection)
        return endpoint_of(connection, ListenToPeers(port if connection is connections[0] else 0, peers))

    return of_all(listen, connections)


def _check_reach(connections: Sequence[NodeConnection], endpoints: Sequence[PeerEndpoint]) -> None:
    """Check, once for the same nodes, that each can connect to others."""
    hosts = frozenset(endpoint.host for endpoint in endpoints)
    if all(hosts <= connection.reached for connection in connections):
        return
    check_reach(connections, endpoints)
    for connection in connections:
        connection.reached = hosts
