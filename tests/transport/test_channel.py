"""Messages over a socket arrive whole, in order and with their descriptors, and nothing that comes harms who receives."""

import os
import random
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from accelerate_nb.errors import ProtocolError
from accelerate_nb.transport.channel import Channel, ReceivedMessage, encode, frame, message_of
from accelerate_nb.transport.messages import (
    VERSION,
    BeginTask,
    FilePart,
    ForkWorker,
    Heartbeat,
    KillGroup,
    LeaveGroup,
    Message,
    OpenGroup,
    QueryStacks,
    RankOutcome,
    SignalRanks,
    StacksReply,
    StartWorkers,
)
from tests.processes import FD_SETSIZE, many_descriptors
from tests.transport.test_messages import EXAMPLES, worker

HEAD = struct.Struct("<4sHHI")


def headed(body: bytes, version: int = VERSION, descriptors: int = 0, length: int | None = None) -> bytes:
    """Bytes with a head in front of them."""
    return HEAD.pack(b"\x93ANB", version, descriptors, len(body) if length is None else length) + body


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    near, far = (Channel(end) for end in socket.socketpair())
    with closing(near), closing(far):
        yield near, far


@pytest.fixture
def raw_and_channel() -> Iterator[tuple[socket.socket, Channel]]:
    raw, far = socket.socketpair()
    with raw, closing(Channel(far)) as channel:
        yield raw, channel


@pytest.fixture
def pipe() -> Iterator[int]:
    read, write = os.pipe()
    yield write
    os.close(read)
    os.close(write)


def messages_in(channel: Channel) -> list[Message]:
    return [received.message for received in channel.receive_ready()]


def copies_of(descriptor: int) -> int:
    """How many descriptors of this process are the same file; what its other threads open and close does not count."""
    numbers = os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd")
    return sum(is_same(int(number), descriptor) for number in numbers)


def is_same(number: int, descriptor: int) -> bool:
    try:
        return os.path.sameopenfile(number, descriptor)
    except OSError:  # closed since it was listed
        return False


# --------------------------------------------------------------------------------------------------- what is delivered


def test_messages_come_in_order_however_large(ends: tuple[Channel, Channel]) -> None:
    near, far = ends
    messages = [ForkWorker(str(size), worker(text="ü\n" * size)) for size in (0, 1, 500_000, 3)]
    sending = threading.Thread(target=lambda: [near.send(message) for message in messages], daemon=True)
    sending.start()
    found = [far.receive() for _ in messages]
    sending.join()
    assert [received.message for received in found if received] == messages


@pytest.mark.parametrize("count", [0, 1, 3, 253, 254, 700])
def test_descriptors_come_with_their_message_and_stay_open_here(ends, pipe: int, count: int) -> None:
    near, far = ends
    held = [os.dup(pipe) for _ in range(count)]
    before = copies_of(pipe)
    sent: list[tuple[Message, Sequence[int]]] = [
        (KillGroup(), []),
        (ForkWorker("a", worker(text="x" * 1000)), held),
        (OpenGroup("after"), [pipe]),
        (KillGroup(), []),
    ]
    sending = threading.Thread(target=lambda: [near.send(*item) for item in sent], daemon=True)
    sending.start()
    found = [received for received in (far.receive() for _ in sent) if received]
    sending.join()
    arrived = [number for received in found for number in received.descriptors]
    try:
        assert [received.message for received in found] == [message for message, _ in sent]
        assert [len(received.descriptors) for received in found] == [0, count, 1, 0]
        assert all(os.path.sameopenfile(number, pipe) for number in (*held, *arrived))
        assert not any(os.get_inheritable(number) for number in arrived)
    finally:
        for number in (*held, *arrived):
            os.close(number)
    assert copies_of(pipe) == before - count


def test_messages_from_many_threads_don_t_mix(ends: tuple[Channel, Channel]) -> None:
    near, far = ends
    messages = {run: [ForkWorker(run, worker(n, run * 3000)) for n in range(20)] for run in "abcd"}
    with ThreadPoolExecutor(4) as threads:
        threads.map(lambda run: [near.send(message) for message in messages[run]], messages)
        found = [received.message for received in (far.receive() for _ in range(80)) if received]
    for run, sent in messages.items():
        assert [message for message in found if isinstance(message, ForkWorker) and message.run == run] == sent
    assert far.error is None


def test_what_is_ready_is_received_without_waiting(ends: tuple[Channel, Channel]) -> None:
    near, far = ends
    assert messages_in(far) == []
    near.send(KillGroup())
    near.send(LeaveGroup())
    assert messages_in(far) == [KillGroup(), LeaveGroup()]
    assert not far.is_ended
    near.send(KillGroup())
    near.close()
    assert messages_in(far) == [KillGroup()]
    assert far.is_ended
    assert far.receive() is None
    assert not far.try_send(KillGroup())


def test_a_message_that_was_cut_off_is_none(raw_and_channel: tuple[socket.socket, Channel]) -> None:
    raw, channel = raw_and_channel
    raw.sendall(frame(KillGroup()) + frame(SignalRanks(2, (0,)))[:-1])
    raw.close()
    assert channel.receive() == ReceivedMessage(KillGroup())
    assert channel.receive() is None


def test_a_socket_between_machines_carries_messages_without_descriptors() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = Channel(socket.create_connection(server.getsockname()))
        far = Channel(server.accept()[0])
    with closing(near), closing(far):
        near.send(SignalRanks(2, (0, 1)))
        assert far.receive() == ReceivedMessage(SignalRanks(2, (0, 1)))


def test_files_arrive_as_they_are_where_no_descriptors_pass(tmp_path: Path) -> None:
    # also what looks like a message, and more than one part
    contents = [b"", frame(KillGroup()), bytes(range(256)) * (5 << 12)]
    for number, content in enumerate(contents):
        (tmp_path / str(number)).write_bytes(content)
    one, other = socket.socketpair()
    with (
        ExitStack() as files,
        closing(Channel(one, passes_descriptors=False)) as near,
        closing(Channel(other, passes_descriptors=False)) as far,
        ThreadPoolExecutor(1) as thread,
    ):
        descriptors = [files.enter_context((tmp_path / str(number)).open()).fileno() for number in range(3)]
        sent = [thread.submit(near.send, StartWorkers(()), descriptors), thread.submit(near.send, KillGroup())]
        received = far.receive()
        assert received is not None
        assert [os.pread(descriptor, 1 << 24, 0) for descriptor in received.descriptors] == contents
        assert not far.is_receiving_file
        assert far.receive() == ReceivedMessage(KillGroup())
        assert far.error is None
        for descriptor in received.descriptors:
            os.close(descriptor)
        for item in sent:
            item.result()


def test_a_file_that_is_cut_off_is_none() -> None:
    one, other = socket.socketpair()
    with one, closing(Channel(other, passes_descriptors=False)) as far:
        one.sendall(frame(FilePart(1000, True)) + b"x" * 999)
        assert messages_in(far) == []
        assert far.is_receiving_file
        one.shutdown(socket.SHUT_WR)
        assert far.receive() is None


def test_a_reader_that_is_stuck_costs_a_message_and_not_the_stream() -> None:
    one, other = socket.socketpair()
    one.setblocking(False)
    with closing(Channel(one)) as near, closing(Channel(other)) as far:
        sent = 0
        while near.try_send(SignalRanks(sent, ())):
            sent += 1
        assert messages_in(far) == [SignalRanks(number, ()) for number in range(sent)]
        near.send(KillGroup())
        assert messages_in(far) == [KillGroup()]
        assert far.error is None


def test_a_message_that_has_begun_waits_for_its_reader_whatever_the_number_of_the_descriptor() -> None:
    one, other = socket.socketpair()
    with ExitStack() as stack:
        high = stack.enter_context(many_descriptors())(one)
        high.setblocking(False)
        near, far = (stack.enter_context(closing(Channel(end))) for end in (high, other))
        assert near.fileno() >= FD_SETSIZE
        long = SignalRanks(2, tuple(range(200_000)))
        with ThreadPoolExecutor(1) as pool:
            received = pool.submit(far.receive, 20.0)
            near.send(long)
            assert received.result().message == long


def test_a_message_is_one_piece_of_bytes_where_there_is_no_socket() -> None:
    assert [message_of(frame(message, message.carries or 0)) for message in EXAMPLES] == EXAMPLES
    for data in (b"", b"{}", frame(KillGroup())[:-1], frame(KillGroup()) + b"more", 2 * frame(KillGroup())):
        with pytest.raises(ProtocolError):
            message_of(data)


# ----------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (headed(b'{"type": "DoIt"}'), "malformed"),
        (headed(b"\xff\x00{"), "malformed"),
        (headed(encode(KillGroup()), version=VERSION + 1), "version"),
        (headed(encode(KillGroup()), descriptors=1), "descriptors"),
        (headed(encode(RankOutcome(0, 0))), "descriptors"),
        (headed(b"x" * 5000), "oversized"),
        (headed(b"", length=0xFFFFFFFF), "oversized"),
        (frame(SignalRanks(2, (0, 1)))[:-1] + frame(KillGroup()), "malformed"),
        (b"GET / HTTP/1.1\r\n\r\n", "malformed"),
        (b"\x93ANX", "malformed"),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_what_is_not_understood_ends_a_channel_after_what_came_before(bad: bytes, reason: str, at_once: bool) -> None:
    raw, far = socket.socketpair()
    with raw, closing(Channel(far, size_limit=4000)) as channel:
        found, data = [], frame(KillGroup()) + bad + frame(KillGroup())
        for piece in [data] if at_once else [data[at : at + 1] for at in range(len(data))]:
            if not channel.is_ended:
                raw.sendall(piece)
            found += messages_in(channel)
        assert found == [KillGroup()]
        assert channel.is_ended
        assert channel.error is not None
        assert channel.error.refusal == reason
        assert channel.receive() is None


def test_a_login_s_greeting_may_come_before_the_first_message_where_it_is_expected() -> None:
    for greeting in (b"", b"Welcome\r\n\x93AN", b"x" * 60_000):
        raw, far = socket.socketpair()
        with raw, closing(Channel(far, after_greeting=True)) as channel:
            raw.sendall(greeting + frame(KillGroup()))
            assert messages_in(channel) == [KillGroup()]
            raw.sendall(b"Welcome")
            assert messages_in(channel) == []
            assert channel.is_ended
    raw, far = socket.socketpair()
    with raw, closing(Channel(far, after_greeting=True)) as channel:
        raw.sendall(b"x" * 70_000)
        assert messages_in(channel) == []
        assert channel.is_ended


def test_descriptors_of_what_is_refused_are_closed(pipe: int) -> None:
    for data, count in (
        (headed(b"no message", descriptors=2), 2),
        (headed(encode(KillGroup()), descriptors=1), 1),
        (headed(encode(OpenGroup("a")), version=VERSION + 1, descriptors=1), 1),
        (headed(encode(OpenGroup("a")), descriptors=1), 0),
        (frame(KillGroup()), 1),
        (b"no message", 1),
    ):
        raw, far = socket.socketpair()
        with raw, closing(Channel(far)) as channel:
            before = copies_of(pipe)
            socket.send_fds(raw, [data], [pipe] * count)
            messages_in(channel)
            assert channel.error is not None, data
            assert copies_of(pipe) == before


def test_a_message_that_is_not_expected_is_refused_with_its_descriptors(raw_and_channel, pipe: int) -> None:
    raw, channel = raw_and_channel
    before = copies_of(pipe)
    socket.send_fds(raw, [frame(BeginTask(1, None, ()), 2)], [pipe, pipe])
    (received,) = channel.receive_ready()
    assert all(os.path.sameopenfile(number, pipe) for number in received.descriptors)
    channel.refuse(received)
    assert channel.refused == 1
    assert copies_of(pipe) == before


def test_a_request_gets_its_reply_past_heartbeats_and_what_is_not_expected(ends: tuple[Channel, Channel]) -> None:
    near, far = ends
    for message in (Heartbeat(), KillGroup(), StacksReply("text")):
        far.send(message)
    assert near.request(QueryStacks(), StacksReply, 5.0) == StacksReply("text")
    assert near.refused == 1
    assert messages_in(far) == [QueryStacks()]
    with pytest.raises(TimeoutError):
        near.request(QueryStacks(), StacksReply, 0.01)
    far.close()
    with pytest.raises(OSError, match=r"closed|Broken pipe|reset"):
        near.request(QueryStacks(), StacksReply, 5.0)


def test_descriptors_that_nobody_received_are_closed_with_the_channel(raw_and_channel, pipe: int) -> None:
    raw, channel = raw_and_channel
    before = copies_of(pipe)
    socket.send_fds(raw, [frame(OpenGroup("a"), 1)[:-1]], [pipe])
    assert messages_in(channel) == []
    assert copies_of(pipe) == before + 1
    channel.close()
    assert copies_of(pipe) == before


def test_what_is_too_long_or_has_other_descriptors_is_not_sent(ends, pipe: int) -> None:
    near, far = ends
    small = Channel(near._socket, size_limit=100)
    for send, reason in (
        (lambda: small.send(OpenGroup("x" * 100), [pipe]), "oversized"),
        (lambda: near.send(OpenGroup("x")), "descriptors"),
        (lambda: near.send(KillGroup(), [pipe]), "descriptors"),
        (lambda: near.send(ForkWorker("x", worker()), [pipe] * 4000), "descriptors"),
    ):
        with pytest.raises(ProtocolError) as caught:
            send()
        assert caught.value.refusal == reason
    assert messages_in(far) == []


@pytest.mark.parametrize("seed", range(20))
def test_no_bytes_whatever_raise_anything(pipe: int, seed: int) -> None:
    draw = random.Random(seed)
    before, ended = copies_of(pipe), 0
    for _ in range(100):
        raw, far = socket.socketpair()
        with raw, closing(Channel(far, size_limit=10_000)) as channel:
            message = draw.choice(EXAMPLES)
            data = bytearray(frame(message, message.carries or 0))
            match draw.randrange(4):
                case 0:
                    data = bytearray(draw.randbytes(draw.randrange(200)))
                case 1:
                    for _ in range(draw.randrange(1, 5)):
                        data[draw.randrange(len(data))] = draw.randrange(256)
                case 2:
                    data[draw.randrange(len(data)) :] = b"\x93ANB" + draw.randbytes(draw.randrange(20))
                case _:
                    pass
            if data:
                socket.send_fds(raw, [bytes(data)], [pipe] * draw.choice([0, 0, 1, 2]))
            for received in channel.receive_ready():
                assert isinstance(received.message, Message)
                for number in received.descriptors:
                    os.close(number)
            ended += channel.error is not None
    assert ended > 10
    assert copies_of(pipe) == before
