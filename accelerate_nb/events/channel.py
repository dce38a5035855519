"""How events travel: one stream a worker, one line of JSON an event."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

from accelerate_nb.events.model import Event, from_line, to_line


class Sender:
    """A worker's end: puts its events on a socket, from any thread."""

    def __init__(self, sock: socket.socket, rank: int) -> None:
        self.rank = rank
        self._socket = sock
        self._lock = threading.Lock()

    def send(self, event: Event) -> None:
        """Send one event; where nobody reads any more, it is dropped."""
        line = to_line(event)
        with self._lock:
            try:
                self._socket.sendall(line)
            except OSError:
                # the notebook's process has gone, and this one is about to be ended
                return


class EventReader:
    """The reader's end of one stream: gives whole events out of bytes as they come."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[Event]:
        """The events that are complete now."""
        first, *others = data.split(b"\n")
        self._parts.append(first)
        for other in others:
            line, self._parts = b"".join(self._parts), [other]
            yield from_line(line)
