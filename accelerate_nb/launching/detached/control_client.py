"""The side of a process that attaches to a run: its requests to the run host."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from accelerate_nb.launching.detached.control_socket import connect
from accelerate_nb.transport.channel import Channel
from accelerate_nb.transport.messages import Message

_TIMEOUT = 5.0
# How long a command may take until what it passes on arrives, in seconds.
_TUNNEL_TIMEOUT = 30.0


class ControlClient:
    """
    Sends requests to a run host over one connection, which is made again where it broke; from any thread.

    `tunnel` is the command that passes on its standard input to the socket where that is on another machine.
    """

    def __init__(self, path: Path, tunnel: Sequence[str] = ()) -> None:
        self._path, self._tunnel = path, tunnel
        self._sock: socket.socket | None = None
        self._channel: Channel | None = None
        self._lock = threading.Lock()

    def request(self, message: Message, timeout: float = _TIMEOUT) -> Message:
        """The reply to a message; raises `OSError` where no run host replies in time."""
        with self._lock:
            try:
                if self._sock is None or self._channel is None:
                    self._sock = tunnelled(self._tunnel) if self._tunnel else connect(self._path, _TIMEOUT)
                    self._channel = Channel(self._sock, passes_descriptors=not self._tunnel)
                    timeout += _TUNNEL_TIMEOUT if self._tunnel else 0.0
                self._sock.settimeout(timeout)
                return self._channel.request(message, Message, timeout)
            except OSError:
                self.close()
                raise

    def close(self) -> None:
        """Close the connection."""
        if self._channel is not None:
            self._channel.close()
        self._sock = self._channel = None


def tunnelled(command: Sequence[str]) -> socket.socket:
    """A socket that is the standard input and output of a command, which ends with it."""
    near, far = socket.socketpair()
    with far:
        end = far.fileno()
        subprocess.Popen(command, stdin=end, stdout=end, stderr=subprocess.DEVNULL, start_new_session=True)
    return near
