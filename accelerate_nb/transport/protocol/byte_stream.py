"""The connections that a channel sends bytes over: sockets, and the standard input and output of a command that ssh started."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterable
from typing import Any, Protocol, TypeGuard


class ByteStream(Protocol):
    """The part of a socket that a channel over a connection without descriptors needs."""

    def fileno(self) -> int:
        """The descriptor that is read; -1 where it is closed."""

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        """At most so many bytes, none at the end of the stream; the flags are 0 or `socket.MSG_DONTWAIT`."""

    def sendmsg(self, buffers: Iterable[memoryview], ancillary: Iterable[Any] = (), /) -> int:
        """Send some of the bytes; returns how many."""

    def shutdown(self, how: int, /) -> None:
        """End the connection."""

    def close(self) -> None:
        """Close the descriptors."""


class StreamPair:
    """
    A stream to read from and another to write to, which a `Channel` takes as one connection.

    >>> Channel(StreamPair(0, 1))
    """

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer = reader, writer

    def fileno(self) -> int:
        """The descriptor that is read; -1 where it is closed."""
        return self._reader

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        """At most so many bytes, none at the end of the stream; raises `BlockingIOError` with `MSG_DONTWAIT` where there are none yet."""
        if flags & socket.MSG_DONTWAIT and not is_readable(self._reader, 0):
            raise BlockingIOError
        return os.read(self._reader, size)

    def sendmsg(self, buffers: Iterable[memoryview], _: Iterable[Any] = (), /) -> int:
        """Send some of the bytes; returns how many."""
        return os.writev(self._writer, list(buffers))

    def shutdown(self, _: int = socket.SHUT_RDWR, /) -> None:
        """End the connection by closing both descriptors, which nothing else may wait for."""
        self.close()

    def close(self) -> None:
        """Close both descriptors."""
        if self._reader >= 0:
            os.close(self._reader)
            os.close(self._writer)
            self._reader = self._writer = -1


def is_readable(descriptor: int, timeout: float) -> bool:
    """Whether a descriptor becomes readable, or ends, within so many seconds."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout * 1000))


def is_writable(descriptor: int) -> bool:
    """Whether a short message can be sent over a socket without waiting."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(0))


def is_unix_socket(sock: socket.socket | ByteStream) -> TypeGuard[socket.socket]:
    """Whether a stream is a socket that passes descriptors."""
    return isinstance(sock, socket.socket) and sock.family == getattr(socket, "AF_UNIX", None)
