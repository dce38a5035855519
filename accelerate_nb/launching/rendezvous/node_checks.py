"""What node 0 checks once all nodes have come: that each can connect to others, and by how much their clocks differ."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing

from accelerate_nb.errors import LaunchError
from accelerate_nb.launching.node_agent.node_facts import clock_offset, facts_of_this_node
from accelerate_nb.launching.node_agent.node_network import NodeNetwork, connect
from accelerate_nb.launching.nodes.node_connection import REPLY_TIMEOUT
from accelerate_nb.launching.nodes.peer_reach import RequestedNode, check_reach, endpoint_of, of_all
from accelerate_nb.transport.channel import Channel, Reply
from accelerate_nb.transport.messages import (
    ConnectToPeers,
    ListenToPeers,
    Message,
    NodeFacts,
    QueryNode,
)


class WaitingNode:
    """A node that has joined a rendezvous, and waits for its answer: it replies to what is asked of it meanwhile."""

    def __init__(self, channel: Channel, name: str) -> None:
        self._channel, self.name = channel, name

    def request(self, message: Message, reply_class: type[Reply], timeout: float) -> Reply:
        """Send a message, and wait for its reply; raises `LaunchError` where none comes."""
        try:
            return self._channel.request(message, reply_class, timeout)
        except TimeoutError:
            reason = f"nothing came from it within {timeout:g} s"
        except OSError as error:
            reason = f"its connection has ended: {error.strerror or error}"
        raise LaunchError(f"A run on {self.name} was requested, and it was lost: {reason}. Launch again on each node.")


class _ThisNode:
    """Node 0 itself, among the nodes that are checked."""

    def __init__(self, name: str, network: NodeNetwork) -> None:
        self.name, self._network = name, network

    def request(self, message: Message, reply_class: type[Reply], timeout: float) -> Reply:
        """Carry out a request here."""
        reply = reply_to(message, self._network)
        assert isinstance(reply, reply_class)
        return reply


def check_nodes(address: str, name: str, others: Sequence[RequestedNode]) -> None:
    """
    Check that this node, which has an address and a name, and the others can connect to each other.

    Raises `LaunchError` where a node can't connect to another one, or was lost.
    """
    with closing(NodeNetwork(address)) as network:
        nodes: tuple[RequestedNode, ...] = (_ThisNode(name, network), *others)
        check_reach(nodes, of_all(lambda node: endpoint_of(node, ListenToPeers(0, ())), nodes))


def reply_to(message: Message, network: NodeNetwork) -> Message | None:
    """The reply of this node to what a rendezvous checks, which may take some seconds; `None` to anything else."""
    match message:
        case QueryNode():
            return facts_of_this_node(network.address)
        case ListenToPeers():
            return network.listen(message)
        case ConnectToPeers():
            return connect(message)
    return None


def clock_offset_of(node: WaitingNode) -> float:
    """By how many seconds a node's clock is ahead of this machine's."""
    sent = time.time()
    facts = node.request(QueryNode(), NodeFacts, REPLY_TIMEOUT)
    return clock_offset(facts, sent, time.time())
