"""One thread reads the channels of all nodes, finds those that are silent, and lets no node wait for another."""

import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from accelerate_nb.launching.node_agent.remote_agent import ChannelReader
from accelerate_nb.transport.channel import Channel, ReceivedMessage
from accelerate_nb.transport.messages import GroupClosed, Heartbeat, Message, PeersReached

TIMEOUT = 30.0


class Node:
    """A node whose channel is read, and what came of it."""

    def __init__(self, reader: ChannelReader, silence_limit: float = TIMEOUT) -> None:
        near, far = socket.socketpair()
        self.channel, self.far = Channel(near), Channel(far)
        self.came: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.ends: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        reader.read(self.channel, self._take, self.ends.put, silence_limit)

    def _take(self, received: ReceivedMessage) -> bool:
        self.came.put(received.message)
        return isinstance(received.message, GroupClosed)


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    reader = ChannelReader()
    with ExitStack() as made:
        found = [Node(reader) for _ in range(12)]
        for node in found:
            made.callback(node.channel.close)
            made.callback(node.far.close)
        yield found


def test_one_thread_reads_all_channels_until_their_last_message(nodes: list[Node]) -> None:
    messages = [PeersReached({str(number): "x"}) for number in range(3)]
    [thread] = [thread for thread in threading.enumerate() if thread.name == "accelerate_nb nodes"]
    for message in (*messages, GroupClosed(), Heartbeat()):
        for node in nodes:
            node.far.send(message)
    for node in nodes:
        assert node.ends.get(timeout=TIMEOUT) is None
        assert [node.came.get(timeout=TIMEOUT) for _ in range(4)] == [*messages, GroupClosed()]
        # the next group's
        assert node.came.empty()
    thread.join(TIMEOUT)
    assert not thread.is_alive()
    assert nodes[0].channel.receive(TIMEOUT) == ReceivedMessage(Heartbeat())


def test_a_silent_node_and_one_that_has_gone_are_found_while_others_go_on(nodes: list[Node]) -> None:
    reader = ChannelReader()
    silent, gone = Node(reader, 0.2), Node(reader)
    with closing(silent.channel), closing(silent.far), closing(gone.channel), closing(gone.far):
        gone.far.shutdown()
        assert gone.ends.get(timeout=TIMEOUT) == "its connection has ended"
        assert "nothing came for 0.2 s" in (silent.ends.get(timeout=TIMEOUT) or "")
        # nobody waits any longer until it takes a message
        assert not silent.channel.try_send(Heartbeat())
    assert all(node.ends.empty() for node in nodes)


def test_a_node_that_does_not_read_keeps_no_other_from_its_heartbeats() -> None:
    reader = ChannelReader()
    stuck, other = Node(reader), Node(reader)
    with closing(stuck.channel), closing(stuck.far), closing(other.channel), closing(other.far):
        thread = threading.Thread(target=stuck.channel.try_send, args=(PeersReached({"0": "x" * (8 << 20)}),))
        thread.start()
        assert other.far.receive(TIMEOUT) == ReceivedMessage(Heartbeat())
        assert thread.is_alive()
        stuck.channel.shutdown()
        thread.join(TIMEOUT)
        other.far.send(GroupClosed())
        assert other.ends.get(timeout=TIMEOUT) is None
