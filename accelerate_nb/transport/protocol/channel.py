"""A channel of messages over a stream socket, with descriptors beside them where it is a Unix socket."""

from __future__ import annotations

import array
import errno
import os
import select
import socket
import stat
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import NamedTuple

from accelerate_nb.errors import ProtocolError
from accelerate_nb.transport.memory_file import memory_file
from accelerate_nb.transport.protocol.byte_stream import ByteStream, is_readable, is_unix_socket
from accelerate_nb.transport.protocol.message import Message
from accelerate_nb.transport.protocol.message_codec import decode, encode
from accelerate_nb.transport.protocol.messages import FilePart

# The version of the messages: to be raised when a message changes in what it means or holds. The head itself stays.
VERSION = 4
# The first byte is no ASCII, which messages are made of: after anything refused, the next head can be found.
_MAGIC = b"\x93ANB"
# The magic, the version, how many descriptors come with the message, and its length.
_HEAD = struct.Struct("<4sHHI")
# A message that is longer is refused, by its sender and by its receiver.
SIZE_LIMIT = 64 << 20
# Linux passes at most this many descriptors at once (SCM_MAX_FD).
_MOST_DESCRIPTORS = 253
_READ_AT_ONCE = 1 << 16
# The bytes of a file that one message brings over a connection that passes no descriptors.
_FILE_PART = 4 << 20
# How long a message of which a part was sent may wait for its reader, in seconds.
_SEND_TIMEOUT = 10.0


class ReceivedMessage(NamedTuple):
    """A message, and the descriptors that came with it, which are the receiver's to close."""

    message: Message
    descriptors: tuple[int, ...] = ()


def frame(message: Message, descriptors: int = 0, size_limit: int = SIZE_LIMIT) -> bytes:
    """A message with its head; raises `ProtocolError` where it is too long, or can't have so many descriptors."""
    body = encode(message)
    if len(body) > size_limit:
        raise ProtocolError(
            "oversized", f"a message of {len(body)} bytes was to be sent, and {size_limit} is the limit"
        )
    if message.carries not in {None, descriptors} or descriptors > _HEAD.size * _MOST_DESCRIPTORS:
        raise ProtocolError("descriptors", f"{type(message).__name__} was to be sent with {descriptors} descriptors")
    return _HEAD.pack(_MAGIC, VERSION, descriptors, len(body)) + body


def message_of(data: bytes) -> Message:
    """The one message in `data`, which `frame` made; raises `ProtocolError` where there is another content."""
    reader = FrameReader()
    reader.feed(data)
    received = reader.next()
    if received is None or not reader.is_empty:
        raise reader.last_error or ProtocolError("malformed", f"{len(data)} bytes are not one whole message")
    return received[0]


class FrameReader:
    """
    Messages out of bytes as they come. Whatever is no message is refused, counted by its reason, and passed over.

    >>> reader = FrameReader()
    >>> reader.feed(frame(KillGroup())[:-1])
    >>> reader.next()
    >>> reader.feed(b"}")
    >>> reader.next()
    (KillGroup(), 0)
    """

    def __init__(self, size_limit: int = SIZE_LIMIT) -> None:
        self.refused: Counter[str] = Counter()
        self.last_error: ProtocolError | None = None
        # descriptors that came with refused messages
        self.refused_descriptors = 0
        self._size_limit = size_limit
        self._data = bytearray()
        # no other head begins before it, within the message at the beginning
        self._searched = 0
        # whether what comes up to the next head is refused already
        self._is_skipping = False

    @property
    def is_empty(self) -> bool:
        """Whether no message has begun that has not ended."""
        return not self._data

    def feed(self, data: bytes) -> None:
        """Take in what has come."""
        self._data += data

    def next(self) -> tuple[Message, int] | None:
        """The next whole message, and how many descriptors its head counts; `None` where more has to come first."""
        while self._find_head() and len(self._data) >= _HEAD.size:
            _, version, descriptors, length = _HEAD.unpack_from(self._data)
            end = _HEAD.size + length
            following = self._following(end)
            try:
                _check_head(version, length, self._size_limit, is_whole=following < 0)
                if len(self._data) < end:
                    return None
                message = _opened(bytes(self._data[_HEAD.size : end]), descriptors)
            except ProtocolError as error:
                self.refuse(error)
                self.refused_descriptors += descriptors
                self._pass_over(end if following < 0 else following)
            else:
                self._drop(end)
                return message, descriptors
        return None

    def refuse(self, error: ProtocolError) -> None:
        """Count a refused message."""
        self.refused[error.refusal] += 1
        self.last_error = error

    def _following(self, end: int) -> int:
        """The place of another head before `end`, which no message has in it; -1 where there is none."""
        start, self._searched = max(self._searched, len(_MAGIC)), max(len(self._data) - len(_MAGIC) + 1, 0)
        return self._data.find(_MAGIC, start, end + len(_MAGIC) - 1)

    def _pass_over(self, end: int) -> None:
        """Drop a refused message, of which a part may still have to come."""
        self._is_skipping = len(self._data) < end
        # the last bytes may be the beginning of the next one
        self._drop(min(end, len(self._data) - len(_MAGIC) + 1) if self._is_skipping else end)

    def _find_head(self) -> bool:
        """Drop what stands before the next head; whether there may be one."""
        at = self._data.find(_MAGIC)
        if at < 0:
            # the last bytes may be the beginning of one
            kept = next(size for size in range(len(_MAGIC) - 1, -1, -1) if self._data.endswith(_MAGIC[:size]))
            at = len(self._data) - kept
        if at and not self._is_skipping:
            self.refuse(ProtocolError("malformed", "bytes that are no message have come"))
            self._is_skipping = True
        if at:
            self._drop(at)
        self._is_skipping &= not (found := self._data.startswith(_MAGIC))
        return found

    def _drop(self, count: int) -> None:
        del self._data[:count]
        self._searched = 0


def _check_head(version: int, length: int, size_limit: int, *, is_whole: bool) -> None:
    if version != VERSION:
        text = f"a message has version {version} of the protocol, and {VERSION} is understood here"
        raise ProtocolError("version", text)
    if length > size_limit:
        raise ProtocolError("oversized", f"a message has {length} bytes, and {size_limit} is the limit")
    if not is_whole:
        raise ProtocolError("malformed", "a message lacks its end")


def _opened(body: bytes, descriptors: int) -> Message:
    message = decode(body)
    if message.carries not in {None, descriptors}:
        raise ProtocolError("descriptors", f"{type(message).__name__} came with {descriptors} descriptors")
    return message


class Channel:
    """
    One end of a connection: sends messages from any thread, and receives them in one.

    A message that can't be understood never raises anything here: it is passed over, and counted in `refused`. Over a Unix socket
    a message carries descriptors; elsewhere, or without `passes_descriptors`, the contents of files, which arrive as memory files.

    >>> with Channel(near) as channel:
    ...     channel.send(SignalRanks(2, (0, 1)))
    ...     message, descriptors = channel.receive()
    """

    def __init__(
        self, sock: socket.socket | ByteStream, size_limit: int = SIZE_LIMIT, *, passes_descriptors: bool = True
    ) -> None:
        self._socket: ByteStream = sock
        self._size_limit = size_limit
        self._reader = FrameReader(size_limit)
        self._lock = threading.Lock()
        self._descriptors: deque[int] = deque()
        # whether descriptors arrive as they are, rather than as the contents of their files
        self._unix_socket = sock if passes_descriptors and is_unix_socket(sock) else None
        self.passes_descriptors = self._unix_socket is not None
        # a file that is still arriving
        self._file: int | None = None
        # whether the other end has gone, so that no more will come
        self.is_ended = False

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def refused(self) -> Counter[str]:
        """How many messages were refused, by the reason."""
        return self._reader.refused

    @property
    def last_error(self) -> ProtocolError | None:
        """The last message's fault among those that were refused."""
        return self._reader.last_error

    @property
    def is_closed(self) -> bool:
        """Whether this end was closed."""
        return self._socket.fileno() < 0

    def fileno(self) -> int:
        """The socket's descriptor; -1 where it is closed."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end, and the descriptors that nobody has received."""
        self._socket.close()
        self._drop_descriptors(len(self._descriptors))
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def shutdown(self) -> None:
        """End the connection for both ends; this one is still to be closed."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    # ------------------------------------------------------------------------------------------------------ sending

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """
        Send a message, and copies of descriptors, which stay open here; raises `OSError` where it can't be delivered, and
        `ProtocolError` where the connection passes no descriptors and one of them is no file.

        A socket that doesn't block has room for a message or raises: so messages are short, and what may be long goes into a
        memory file of its own.
        """
        data = memoryview(frame(message, len(descriptors), self._size_limit))
        with self._lock:
            if not self.passes_descriptors:
                self._send_files(message, descriptors)
                descriptors = ()
            # a batch of descriptors goes with a byte at least: all but the last with one each
            batches = [descriptors[at : at + _MOST_DESCRIPTORS] for at in range(0, len(descriptors), _MOST_DESCRIPTORS)]
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
            size, offset = os.fstat(descriptor).st_size, 0
            while True:
                data = os.pread(descriptor, _FILE_PART, offset)
                offset += len(data)
                is_last = not data or offset >= size
                self._send_whole(memoryview(frame(FilePart(data, is_last))))
                if is_last:
                    break

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
                select.select((), (self._socket,), (), _SEND_TIMEOUT)

    # ---------------------------------------------------------------------------------------------------- receiving

    def receive(self, silence_limit: float | None = None) -> ReceivedMessage | None:
        """
        The next message, waited for; `None` where the other end has gone, or speaks another version.
        Raises `OSError` as sockets do, and `TimeoutError` where not one byte has come for `silence_limit` seconds.
        """
        while (received := self._next()) is None:
            # nothing of another version will ever be understood
            if self.is_ended or self.refused["version"]:
                return None
            if silence_limit is not None and not is_readable(self._socket.fileno(), silence_limit):
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
        self._reader.refuse(ProtocolError("unexpected", f"{type(received.message).__name__} was not expected here"))

    def _next(self) -> ReceivedMessage | None:
        while (found := self._reader.next()) is not None:
            self._drop_refused()
            message, count = found
            if isinstance(message, FilePart) and not self.passes_descriptors:
                self._take_file_part(message)
                continue
            if count <= len(self._descriptors):
                return ReceivedMessage(message, tuple(self._descriptors.popleft() for _ in range(count)))
            self._drop_descriptors(len(self._descriptors))
            text = f"{type(message).__name__} came with fewer descriptors than the {count} that it counts"
            self._reader.refuse(ProtocolError("descriptors", text))
        self._drop_refused()
        if self.passes_descriptors and self._reader.is_empty:
            # of no message
            self._drop_descriptors(len(self._descriptors))
        return None

    def _take_file_part(self, part: FilePart) -> None:
        if self._file is None:
            self._file = memory_file("accelerate_nb_file")
        rest = memoryview(part.data)
        while rest:
            rest = rest[os.write(self._file, rest) :]
        if part.is_last:
            self._descriptors.append(self._file)
            self._file = None

    def _drop_refused(self) -> None:
        self._drop_descriptors(min(self._reader.refused_descriptors, len(self._descriptors)))
        self._reader.refused_descriptors = 0

    def _drop_descriptors(self, count: int) -> None:
        for _ in range(count):
            os.close(self._descriptors.popleft())

    def _read(self, flags: int) -> None:
        """Read some bytes, and the descriptors that came with them."""
        sock = self._unix_socket
        data = self._socket.recv(_READ_AT_ONCE, flags) if sock is None else self._read_with_descriptors(sock, flags)
        self.is_ended = not data
        self._reader.feed(data)

    def _read_with_descriptors(self, sock: socket.socket, flags: int) -> bytes:
        space = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)
        data, ancillary, found, _ = sock.recvmsg(_READ_AT_ONCE, space, flags)
        arrived = array.array("i")
        for level, kind, held in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                arrived.frombytes(held[: len(held) - len(held) % arrived.itemsize])
        for descriptor in arrived:
            os.set_inheritable(descriptor, False)
        self._descriptors += arrived
        if found & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, "not all descriptors of a message arrived: too many are open here")
        return data
