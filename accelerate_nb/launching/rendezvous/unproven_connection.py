"""A connection of a stranger to a rendezvous, which may send one short message."""

from __future__ import annotations

import socket

from accelerate_nb.errors import ProtocolError
from accelerate_nb.transport.channel import (
    Channel,
    FrameReader,
)
from accelerate_nb.transport.messages import Message

# The longest message, and what is read at all, in bytes.
_SIZE_LIMIT = 1 << 16
_READ_LIMIT = _SIZE_LIMIT + (1 << 10)


class UnprovenConnection:
    """
    A connection of which the first message is to show whose it is: no file of it is kept, and nothing else is read.

    `channel` is for what is sent, and for what follows once the message was taken.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self.channel = sock, Channel(sock)
        self._reader, self._left = FrameReader(_SIZE_LIMIT), _READ_LIMIT

    def close(self) -> None:
        """Close the connection."""
        self.channel.close()

    def read(self) -> Message | None:
        """
        The message, once all of it has come, without waiting.

        Raises `ProtocolError` where something else has come, and `OSError` where the other end has gone.
        """
        try:
            data = self._socket.recv(self._left, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        if not data:
            raise ConnectionError("it has closed its connection")
        self._left -= len(data)
        self._reader.feed(data)
        found = self._reader.next()
        if found is None and self._left:
            return None
        if found is None or found[1] or not self._reader.is_empty:
            raise ProtocolError("unexpected", "a stranger has sent more than one short message")
        return found[0]
