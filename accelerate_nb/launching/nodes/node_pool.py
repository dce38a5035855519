"""Agents on nodes: the connection to each, and those that stay for the next launch."""

import atexit
import os
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial

from accelerate_nb.errors import LaunchError
from accelerate_nb.events.terminal_lines import plain
from accelerate_nb.launching.node_agent.node_network import REPLY_TIMEOUT, check_reach, endpoint_of, of_all
from accelerate_nb.launching.node_agent.remote_agent import ChannelReader, RemoteAgent
from accelerate_nb.launching.nodes.node_engine import NodeEngine, PlacedAgent
from accelerate_nb.transport.channel import Reply, is_ready
from accelerate_nb.transport.messages import ListenToPeers, Message, NodeFacts, PeerEndpoint, QueryNode
from accelerate_nb.transport.worker_spec import NetworkAddress

# How long a new agent may take until it replies for the first time, in seconds.
_START_TIMEOUT = 60.0
# Facts that are so old need not be asked for again.
_FRESH = 2.0
_LAST_OUTPUT = 2000
# How long agents may take until they have ended, in seconds.
END_TIMEOUT = 2.0


class NodeConnection:
    """An agent on a node, which `engine` places unless it is there already; `open` waits until it has sent the facts of its node."""

    # of its node, once it is open
    facts: NodeFacts

    def __init__(self, engine: NodeEngine, name: str, placed: PlacedAgent | None = None) -> None:
        self.engine, self.name = engine, name
        self._placed = placed or engine.place(name)
        self.channel = self._placed.channel
        # whether the facts of its node are known
        self.is_open = False
        self._queried_at = float("-inf")
        # by how many seconds its clock is ahead of this machine's; 0 where that is less than what can be measured
        self.clock_offset = 0.0
        # the addresses of the nodes to which it can connect
        self.reached: frozenset[str] = frozenset()
        # a reply that did not come in time, or before an interrupt, may come yet, and be taken for another one's
        self.is_usable = True

    @property
    def is_ending(self) -> bool:
        """Whether something comes from an agent without workers: it says nothing by itself, so that is its end."""
        return is_ready(self.channel.fileno(), 0)

    def open(self) -> None:
        """Wait for the agent; raises `LaunchError` with what it, or the way to it, wrote."""
        self._query(_START_TIMEOUT)
        # the first reply came after a start of unknown length
        self._query(REPLY_TIMEOUT)

    def refresh(self) -> None:
        """Check that an agent that was there before still is; raises `LaunchError`."""
        if not self.is_open:
            self.open()
        elif time.monotonic() - self._queried_at > _FRESH or self.is_ending:
            self._query(REPLY_TIMEOUT)

    def request(self, message: Message, reply_class: type[Reply], timeout: float) -> Reply:
        """Send a message to an agent that has no workers, and wait for its reply; raises `LaunchError` where none comes."""
        self.is_usable = False
        try:
            reply = self.channel.request(message, reply_class, timeout)
        except TimeoutError:
            reason = f"nothing came from it within {timeout:g} s"
        except OSError:
            reason = self._reason()
        else:
            self.is_usable = True
            return reply
        raise LaunchError(
            f"Workers on {self.name} were requested, and its agent can't be reached: {reason}. {self.engine.advice(self.name)}."
        )

    def close(self, timeout: float = END_TIMEOUT) -> None:
        """End the agent, which may take so many seconds for it: one that is lost gets 0."""
        self.channel.shutdown()
        self.channel.close()
        if (process := self._placed.process) is not None:
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._placed.output is not None:
            os.close(self._placed.output)

    def _query(self, timeout: float) -> None:
        sent = time.time()
        self.facts = self.request(QueryNode(), NodeFacts, timeout)
        received, self.is_open = time.time(), True
        self._queried_at = time.monotonic()
        offset = self.facts.time - (sent + received) / 2
        self.clock_offset = offset if abs(offset) > (received - sent) / 2 else 0.0

    def _reason(self) -> str:
        """Why nothing more comes."""
        if (error := self.channel.error) is not None:
            is_other = error.refusal == "version"
            return f"{error}: another release of accelerate_nb is installed there" if is_other else str(error)
        process, output = self._placed.process, self._placed.output
        try:
            code = None if process is None else process.wait(2.0)
        except subprocess.TimeoutExpired:
            code = None
        if code is None:
            return "it has closed its connection"
        found = b"" if output is None else os.pread(output, 1 << 20, 0)
        written = plain(found.decode(errors="replace")).strip()[-_LAST_OUTPUT:]
        return f"exit code {code}" + (f", and these last words:\n{written}\n" if written else "")


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

    def refresh(connection: NodeConnection) -> None:
        # one that does not reply is not usable any more; the first reply, which may take long, is left to the run that needs it
        with suppress(LaunchError):
            if connection.is_open or connection.is_ending:
                connection.refresh()

    found = _pool.get().take_all(engine)
    try:
        if found:
            _ = of_all(refresh, found)
    finally:
        for connection in found:
            release(connection, is_usable=True)
    return [connection.name for connection in found if connection.is_usable]


def release(connection: NodeConnection, is_usable: bool) -> None:
    """Give a connection back; one that is not usable any more is closed."""
    if is_usable and connection.is_usable:
        _pool.get().put(connection)
    else:
        connection.close(0.0)


def open_group(
    engine: NodeEngine, names: Sequence[str], port: int, log_folder: str
) -> tuple[list[partial[RemoteAgent]], NetworkAddress]:
    """The agents' factories of a worker group, in the order of nodes, and its rendezvous, open on the first; raises `LaunchError`."""
    # at a port or, with 0, at any free one; without a folder for whole logs on each node, they are sent here
    connections = lease(engine, names)

    def listen(connection: NodeConnection) -> PeerEndpoint:
        peers = tuple(other.facts.address for other in connections if other is not connection)
        return endpoint_of(connection, ListenToPeers(port if connection is connections[0] else 0, peers))

    try:
        endpoints = of_all(listen, connections)
        hosts = frozenset(endpoint.host for endpoint in endpoints)
        # once for the same nodes
        if not all(hosts <= connection.reached for connection in connections):
            check_reach(connections, endpoints)
            for connection in connections:
                connection.reached = hosts
    except BaseException:
        for connection in connections:
            release(connection, is_usable=True)
        raise
    reader = ChannelReader()
    agents = [
        partial(
            RemoteAgent,
            connection.channel,
            name=connection.name,
            clock_offset=connection.clock_offset,
            inherits_environment=engine.inherits_environment,
            release=partial(release, connection),
            log_folder=log_folder,
            reader=reader,
        )
        for connection in connections
    ]
    return agents, NetworkAddress(endpoints[0].host, endpoints[0].port)


def close_nodes() -> None:
    """End the agents that no run uses, all at the same time."""
    connections = _pool.get().take_all()
    for connection in connections:
        connection.channel.shutdown()
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
