"""The side of a process that attaches to a run: its requests to the run host."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

from accelerate_nb.launching.detached.control_socket import connect
from accelerate_nb.transport.fd_messages import receive_message, send_message

_TIMEOUT = 5.0


class ControlClient:
    """Sends requests to a run host over one connection, which is made again where it broke; from any thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sock: socket.socket | None = None
        self._lock = threading.Lock()

    def request(self, message: dict[str, Any], timeout: float = _TIMEOUT) -> dict[str, Any]:
        """The reply to a message; raises `OSError` where no run host replies in time."""
        with self._lock:
            try:
                if self._sock is None:
                    self._sock = connect(self._path, _TIMEOUT)
                self._sock.settimeout(timeout)
                send_message(self._sock, message)
                received = receive_message(self._sock)
                if received is None:
                    raise ConnectionError("the run host has closed the connection")
            except (OSError, ValueError) as error:
                self.close()
                raise error if isinstance(error, OSError) else OSError(str(error)) from None
            return received[0]

    def close(self) -> None:
        """Close the connection."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
