"""A channel of messages over a stream socket, with descriptors beside them where it is a Unix socket."""

import array
import errno
import json
import os
import select
import socket
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple, TypeVar, Union

import msgspec

from accelerate_nb.errors import ProtocolError
from accelerate_nb.transport.memory_file import memory_file
from accelerate_nb.transport.messages import VERSION, FilePart, Heartbeat, Message

_MAGIC = b"\x93ANB"
# The magic, the version of the messages, how many descriptors come with the message, and its length. The head itself stays in all versions.
_HEAD = struct.Struct("<4sHHI")
# A message that is longer is refused, by its sender and by its receiver.
SIZE_LIMIT = 64 << 20
# Linux passes at most this many descriptors at once (SCM_MAX_FD).
MOST_DESCRIPTORS = 253
_READ_AT_ONCE = 1 << 16
# The bytes of a file that follow one message over a connection that passes no descriptors, and those that are read at once.
_FILE_PART = 4 << 20
_FILE_READ_AT_ONCE = 1 << 19
# How long a message of which a part was sent may wait for its reader, in seconds.
_SEND_TIMEOUT = 10.0
# What a login on the way to another machine may print before the first message, in bytes.
_LONGEST_GREETING = 1 << 16

Reply = TypeVar("Reply", bound=Message)

# -------------------------------------------------------------------------------------------------------------- frames

_ENCODER = msgspec.msgpack.Encoder()


@cache
def _decoder() -> msgspec.msgpack.Decoder[Message]:
    return msgspec.msgpack.Decoder(Union[tuple(Message.__subclasses__())])  # noqa: UP007 - of classes that are found


def encode(message: Message) -> bytes:
    """A message as msgpack, or as JSON where a text in it is no UTF-8, or a number too large, which msgpack can't hold."""
    try:
        return _ENCODER.encode(message)
    except (UnicodeEncodeError, OverflowError):
        return json.dumps(msgspec.to_builtins(message)).encode("ascii")


def decode(body: bytes) -> Message:
    """The message that `encode` wrote; raises `ProtocolError` for anything else."""
    try:
        if body.startswith(b"{"):
            message: Message = msgspec.convert(json.loads(body), _decoder().type)
            return message
        return _decoder().decode(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("malformed", f"a message was refused: {error}") from None


def frame(message: Message, descriptors: int = 0, size_limit: int = SIZE_LIMIT) -> bytes:
    """A message with its head; raises `ProtocolError` where it is too long, or can't have so many descriptors."""
    body = encode(message)
    if len(body) > size_limit:
        text = f"a message of {len(body)} bytes was to be sent, and {size_limit} is the limit"
        raise ProtocolError("oversized", text)
    if message.carries not in {None, descriptors} or descriptors > _HEAD.size * MOST_DESCRIPTORS:
        raise ProtocolError("descriptors", f"{type(message).__name__} was to be sent with {descriptors} descriptors")
    return _HEAD.pack(_MAGIC, VERSION, descriptors, len(body)) + body


def message_of(data: bytes) -> Message:
    """The one message in `data`, which `frame` made; raises `ProtocolError` where there is another content."""
    reader = FrameReader()
    reader.feed(data)
    received = reader.next()
    if received is None or not reader.is_empty:
        raise ProtocolError("malformed", f"{len(data)} bytes are not one whole message")
    return received[0]


class FrameReader:
    """Messages out of bytes as they come; bytes that are no message raise a `ProtocolError`, and nothing follows them."""

    def __init__(self, size_limit: int = SIZE_LIMIT, *, after_greeting: bool = False) -> None:
        self._size_limit, self._after_greeting = size_limit, after_greeting
        self._data = bytearray()

    @property
    def is_empty(self) -> bool:
        """Whether no message has begun that has not ended."""
        return not self._data

    def feed(self, data: bytes) -> None:
        self._data += data

    def next(self) -> tuple[Message, int] | None:
        """The next whole message, and how many descriptors come with it; `None` where more has to come first."""
        if self._after_greeting:
            # what comes before the first message is dropped
            at = self._data.find(_MAGIC)
            self._after_greeting = at < 0 and len(self._data) < _LONGEST_GREETING
            del self._data[: max(at, 0)]
            if self._after_greeting:
                return None
        if not _MAGIC.startswith(self._data[: len(_MAGIC)]):
            raise ProtocolError("malformed", "bytes that are no message have come")
        if len(self._data) < _HEAD.size:
            return None
        _, version, descriptors, length = _HEAD.unpack_from(self._data)
        if version != VERSION:
            text = f"a message has version {version} of the protocol, and {VERSION} is understood here"
            raise ProtocolError("version", text)
        if length > self._size_limit:
            raise ProtocolError("oversized", f"a message has {length} bytes, and {self._size_limit} is the limit")
        end = _HEAD.size + length
        if len(self._data) < end:
            return None
        message = decode(bytes(self._data[_HEAD.size : end]))
        if message.carries not in {None, descriptors}:
            raise ProtocolError("descriptors", f"{type(message).__name__} came with {descriptors} descriptors")
        del self._data[:end]
        return message, descriptors

    def take(self, count: int) -> bytes:
        """At most so many bytes that came after the last message, and are none."""
        data = bytes(self._data[:count])
        del self._data[: len(data)]
        return data


# ------------------------------------------------------------------------------------------------------------- streams


class StreamPair:
    """A stream to read from and another to write to, with a socket's methods: one connection of a `Channel`."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer = reader, writer

    def fileno(self) -> int:
        """The descriptor that is read; -1 where it is closed."""
        return self._reader

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        """At most so many bytes, none at the end of the stream; raises `BlockingIOError` with `MSG_DONTWAIT` where there are none yet."""
        if flags & socket.MSG_DONTWAIT and not is_ready(self._reader, 0):
            raise BlockingIOError
        return os.read(self._reader, size)

    def sendmsg(self, buffers: Iterable[memoryview], _: Iterable[Any] = (), /) -> int:
        return os.writev(self._writer, list(buffers))

    def shutdown(self, _: int = socket.SHUT_RDWR, /) -> None:
        """End the connection by closing both descriptors, which nothing else may wait for."""
        self.close()

    def close(self) -> None:
        if self._reader >= 0:
            os.close(self._reader)
            os.close(self._writer)
            self._reader = self._writer = -1


def blocking_pair() -> tuple[socket.socket, socket.socket]:
    """A connected pair of sockets without a timeout, whatever `socket.setdefaulttimeout` has for new ones."""
    pair = socket.socketpair()
    for end in pair:
        # the other process may not know of a timeout, and its descriptor would not block
        end.settimeout(None)
    return pair


def is_ready(descriptor: int, timeout: float, event: int = select.POLLIN) -> bool:
    """Whether a descriptor can be read, or has the other event, or ends, within so many seconds."""
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(timeout * 1000))


# ------------------------------------------------------------------------------------------------------------ channels


class ReceivedMessage(NamedTuple):
    """A message, and the descriptors that came with it, which are the receiver's to close."""

    message: Message
    descriptors: tuple[int, ...] = ()


class Channel:
    """One end of a connection: sends messages from any thread, and receives them in one."""

    # What comes never raises: bytes that are no message of this version end the connection, for the reason in `error`.

    def __init__(
        self,
        sock: socket.socket | StreamPair,
        size_limit: int = SIZE_LIMIT,
        *,
        passes_descriptors: bool = True,
        after_greeting: bool = False,
    ) -> None:
        self._socket = sock
        self._size_limit = size_limit
        self._reader = FrameReader(size_limit, after_greeting=after_greeting)
        self._lock = threading.Lock()
        self._descriptors: deque[int] = deque()
        # whether descriptors arrive as they are, rather than as the contents of their files
        is_unix = isinstance(sock, socket.socket) and sock.family == getattr(socket, "AF_UNIX", None)
        self.passes_descriptors = passes_descriptors and is_unix
        # a file that is still arriving: the bytes of its part that are to come, and whether that is the last
        self._file: int | None = None
        self._missing, self._is_last_part = 0, False
        # whether no more will come, since the other end has gone or, with an `error`, can't be understood
        self.is_ended = False
        self.error: ProtocolError | None = None
        # how many messages had no meaning at this end
        self.refused = 0

    @property
    def is_closed(self) -> bool:
        return self._socket.fileno() < 0

    @property
    def is_receiving_file(self) -> bool:
        """Whether a file is arriving, which takes its time."""
        return self._file is not None

    def fileno(self) -> int:
        """The socket's descriptor; -1 where it is closed."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end, and the descriptors that nobody has received."""
        self._socket.close()
        self._drop_descriptors()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def shutdown(self) -> None:
        """End the connection for both ends; this one is still to be closed."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    # ------------------------------------------------------------------------------------------------------ sending

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message, and copies of descriptors; raises `OSError`, and `ProtocolError` where one can't leave its machine."""
        # a socket that doesn't block has room for a message or raises: messages are short, and what may be long goes into a memory file
        data = memoryview(frame(message, len(descriptors), self._size_limit))
        with self._lock:
            if not self.passes_descriptors:
                self._send_files(message, descriptors)
                descriptors = ()
            # a batch of descriptors goes with a byte at least: all but the last with one each
            batches = [descriptors[at : at + MOST_DESCRIPTORS] for at in range(0, len(descriptors), MOST_DESCRIPTORS)]
            for index, batch in enumerate(batches[:-1]):
                self._send_part(data[:1], batch, has_begun=index > 0)
                data = data[1:]
            self._send_whole(data, batches[-1] if batches else (), has_begun=len(batches) > 1)

    def _send_files(self, message: Message, descriptors: Sequence[int]) -> None:
        """Send the contents of files, which the following message carries."""
        if not all(stat.S_ISREG(os.fstat(descriptor).st_mode) for descriptor in descriptors):
            text = f"{type(message).__name__} was to take along a pipe, a lock or a socket, which can't leave their machine"
            raise ProtocolError("descriptors", text)
        for descriptor in descriptors:
            size, offset, is_last = os.fstat(descriptor).st_size, 0, False
            while not is_last:
                data = os.pread(descriptor, _FILE_PART, offset)
                offset += len(data)
                is_last = not data or offset >= size
                self._send_whole(memoryview(frame(FilePart(len(data), is_last))))
                self._send_whole(memoryview(data), has_begun=True)

    def _send_whole(self, data: memoryview, batch: Sequence[int] = (), *, has_begun: bool = False) -> None:
        sent = self._send_part(data, batch, has_begun=has_begun)
        while sent < len(data):
            data = data[sent:]
            sent = self._send_part(data, (), has_begun=True)

    def try_send(self, message: Message, descriptors: Sequence[int] = ()) -> bool:
        """Send a message; whether it could be delivered."""
        try:
            self.send(message, descriptors)
        except OSError:
            return False
        return True

    def send_at_once(self, message: Message) -> None:
        """Send a short message over a socket, unless it would have to wait: for another one, or until the other end reads."""
        if self._lock.acquire(blocking=False):
            try:
                # who reads finds an error
                with suppress(OSError):
                    if is_ready(self.fileno(), 0, select.POLLOUT):
                        self._send_whole(memoryview(frame(message)))
            finally:
                self._lock.release()

    def _send_part(self, data: memoryview, batch: Sequence[int], *, has_begun: bool) -> int:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", batch))] if batch else []
        deadline = time.monotonic() + _SEND_TIMEOUT
        while True:
            try:
                return self._socket.sendmsg([data], ancillary)
            except BlockingIOError:
                # half a message would make the next ones unreadable
                if not has_begun or time.monotonic() > deadline:
                    raise
                is_ready(self.fileno(), _SEND_TIMEOUT, select.POLLOUT)

    # ---------------------------------------------------------------------------------------------------- receiving

    def receive(self, silence_limit: float | None = None) -> ReceivedMessage | None:
        """The next message; `None` where no more will come. Raises `TimeoutError` after `silence_limit` seconds without a byte."""
        while (received := self._next()) is None:
            if self.is_ended:
                return None
            if silence_limit is not None and not is_ready(self._socket.fileno(), silence_limit):
                raise TimeoutError(f"nothing came for {silence_limit:g} s")
            self._read(0)
        return received

    def receive_ready(self) -> Iterator[ReceivedMessage]:
        """The messages that are there now, without waiting; `is_ended` says afterwards whether more may come."""
        while True:
            while (received := self._next()) is not None:
                yield received
            if self.is_ended or self.is_closed:
                return
            try:
                self._read(socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionError:
                self.is_ended = True

    def refuse(self, received: ReceivedMessage) -> None:
        """Refuse a message that has no meaning at this end, and close its descriptors."""
        for descriptor in received.descriptors:
            os.close(descriptor)
        self.refused += 1

    def request(self, message: Message, reply_class: type[Reply], timeout: float) -> Reply:
        """Send a message, and wait for its reply of a class; raises `TimeoutError`, and `OSError` where the other end has gone."""
        deadline = time.monotonic() + timeout
        self.send(message)
        while (received := self.receive(max(0.0, deadline - time.monotonic()))) is not None:
            if isinstance(received.message, reply_class):
                return received.message
            if not isinstance(received.message, Heartbeat):
                self.refuse(received)
        raise ConnectionError(str(self.error or "the other end has closed the connection"))

    def _next(self) -> ReceivedMessage | None:
        try:
            return self._next_message() if self.error is None else None
        except ProtocolError as error:
            self.error, self.is_ended = error, True
            self._drop_descriptors()
            return None

    def _next_message(self) -> ReceivedMessage | None:
        while self._has_file_part() and (found := self._reader.next()) is not None:
            message, count = found
            if isinstance(message, FilePart) and not self.passes_descriptors and 0 <= message.size <= _FILE_PART:
                self._missing, self._is_last_part = message.size, message.is_last
                if self._file is None:
                    self._file = memory_file("accelerate_nb_file")
                continue
            if count > len(self._descriptors):
                text = f"{type(message).__name__} came with fewer descriptors than the {count} that it counts"
                raise ProtocolError("descriptors", text)
            return ReceivedMessage(message, tuple(self._descriptors.popleft() for _ in range(count)))
        if self._descriptors and self.passes_descriptors and self._reader.is_empty:
            raise ProtocolError("descriptors", "descriptors that belong to no message have come")
        return None

    def _has_file_part(self) -> bool:
        """Take what has come of a file's part; whether all of it has."""
        if self._missing:
            self._write_file(self._reader.take(self._missing))
        if not self._missing and self._is_last_part and self._file is not None:
            self._descriptors.append(self._file)
            self._file, self._is_last_part = None, False
        return not self._missing

    def _write_file(self, data: bytes) -> None:
        assert self._file is not None
        self._missing -= len(data)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._file, rest) :]

    def _drop_descriptors(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _read(self, flags: int) -> None:
        """Read some bytes, and the descriptors that came with them."""
        if self._missing:
            data = self._socket.recv(min(self._missing, _FILE_READ_AT_ONCE), flags)
            self.is_ended = not data
            self._write_file(data)
            return
        if isinstance(self._socket, StreamPair) or not self.passes_descriptors:
            data = self._socket.recv(_READ_AT_ONCE, flags)
        else:
            arrived = array.array("i")
            space = socket.CMSG_SPACE(MOST_DESCRIPTORS * arrived.itemsize)
            data, ancillary, found, _ = self._socket.recvmsg(_READ_AT_ONCE, space, flags)
            for level, kind, held in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    arrived.frombytes(held[: len(held) - len(held) % arrived.itemsize])
            for descriptor in arrived:
                os.set_inheritable(descriptor, False)
            self._descriptors += arrived
            if found & socket.MSG_CTRUNC:
                raise OSError(errno.EMFILE, "not all descriptors of a message arrived: too many are open here")
        self.is_ended = not data
        self._reader.feed(data)
