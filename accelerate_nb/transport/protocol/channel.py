"""A channel of messages over a stream socket, with descriptors beside them where it is a Unix socket."""

from __future__ import annotations

import array
import errno
import os
import select
import socket
import stat
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import NamedTuple

from accelerate_nb.errors import ProtocolError
from accelerate_nb.transport.memory_file import memory_file
from accelerate_nb.transport.protocol.byte_stream import ByteStream, is_readable, is_unix_socket, is_writable
from accelerate_nb.transport.protocol.framing import MOST_DESCRIPTORS, SIZE_LIMIT, FrameReader, frame
from accelerate_nb.transport.protocol.message import Message
from accelerate_nb.transport.protocol.messages import FilePart

_READ_AT_ONCE = 1 << 16
# The bytes of a file that follow one message over a connection that passes no descriptors, and those that are read at once.
_FILE_PART = 4 << 20
_FILE_READ_AT_ONCE = 1 << 19
# How long a message of which a part was sent may wait for its reader, in seconds.
_SEND_TIMEOUT = 10.0


class ReceivedMessage(NamedTuple):
    """A message, and the descriptors that came with it, which are the receiver's to close."""

    message: Message
    descriptors: tuple[int, ...] = ()


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
        # a file that is still arriving: the bytes of its part that are to come, and whether that is the last
        self._file: int | None = None
        self._missing, self._is_last_part = 0, False
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
            size, offset = os.fstat(descriptor).st_size, 0
            while True:
                data = os.pread(descriptor, _FILE_PART, offset)
                offset += len(data)
                is_last = not data or offset >= size
                self._send_whole(memoryview(frame(FilePart(len(data), is_last))))
                if data:
                    self._send_whole(memoryview(data), has_begun=True)
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

    def send_at_once(self, message: Message) -> None:
        """Send a short message over a socket, unless it would have to wait: for another one, or until the other end reads."""
        if self._lock.acquire(blocking=False):
            try:
                if is_writable(self.fileno()):
                    self._send_whole(memoryview(frame(message)))
            except OSError:
                # who reads finds it
                return
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
        while self._has_file_part() and (found := self._reader.next()) is not None:
            self._drop_refused()
            message, count = found
            if isinstance(message, FilePart) and not self.passes_descriptors and 0 <= message.size <= _FILE_PART:
                self._missing, self._is_last_part = message.size, message.is_last
                if self._file is None:
                    self._file = memory_file("accelerate_nb_file")
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

    def _drop_refused(self) -> None:
        self._drop_descriptors(min(self._reader.refused_descriptors, len(self._descriptors)))
        self._reader.refused_descriptors = 0

    def _drop_descriptors(self, count: int) -> None:
        for _ in range(count):
            os.close(self._descriptors.popleft())

    def _read(self, flags: int) -> None:
        """Read some bytes, and the descriptors that came with them."""
        sock = self._unix_socket
        if self._missing:
            data = self._socket.recv(min(self._missing, _FILE_READ_AT_ONCE), flags)
            self.is_ended = not data
            self._write_file(data)
            return
        data = self._socket.recv(_READ_AT_ONCE, flags) if sock is None else self._read_with_descriptors(sock, flags)
        self.is_ended = not data
        self._reader.feed(data)

    def _read_with_descriptors(self, sock: socket.socket, flags: int) -> bytes:
        space = socket.CMSG_SPACE(MOST_DESCRIPTORS * array.array("i").itemsize)
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
