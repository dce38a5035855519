"""The side of a process that attaches to a run: its requests to the run host."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

from accelerate_nb.launching.detached.control_socket import connect
from accelerate_nb.transport.protocol.channel import Channel
from accelerate_nb.transport.protocol.message import Message

_TIMEOUT = 5.0


class ControlClient:
    """Sends requests to a run host over one connection, which is made again where it broke; from any thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sock: socket.socket | None = None
        self._channel: Channel | None = None
        self._lock = threading.Lock()

    def request(self, message: Message, timeout: float = _TIMEOUT) -> Message:
        """The reply to a message; raises `OSError` where no run host replies in time."""
        with self._lock:
            try:
                if self._sock is None or self._channel is None:
                    self._sock = connect(self._path, _TIMEOUT)
                    self._channel = Channel(self._sock)
                self._sock.settimeout(timeout)
                self._channel.send(message)
                received = self._channel.receive()
                if received is None:
                    raise ConnectionError("the run host has closed the connection")
            except OSError:
                self.close()
                raise
            return received.message

    def close(self) -> None:
        """Close the connection."""
        if self._channel is not None:
            self._channel.close()
        self._sock = self._channel = None
