"""The transport of events: one stream a worker, one line of JSON an event."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

from accelerate_nb.events.event_codec import from_line, to_line
from accelerate_nb.events.model import Event


class EventSender:
    """
    The worker's end: sends its events over a socket, from any thread.

    Nobody waits for another who sends: that one sends both. So what is collected as garbage meanwhile may send, too (a
    progress bar closes then), and so may a process that was forked meanwhile.
    """

    def __init__(self, sock: socket.socket, rank: int) -> None:
        self.rank = rank
        self._socket = sock
        self._lock = threading.Lock()
        self._due: deque[bytes] = deque()

    def send(self, event: Event) -> None:
        """Send one event; without a reader, it is dropped."""
        self._due.append(to_line(event))
        # another sender may have seen the end of the queue just before this event came: check again
        while self._due and not self._lock.locked():
            with self._lock:
                self._send_all()

    def _send_all(self) -> None:
        while self._due:
            try:
                self._socket.sendall(self._due.popleft())
            except OSError:
                # the notebook's process has gone, and this one is about to be ended
                self._due.clear()


class EventReader:
    """The reader's end of one stream: gives whole events out of bytes as they come."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[Event]:
        """The events that are complete now; a line that is none, which the function may have written, is left out."""
        first, *others = data.split(b"\n")
        self._parts.append(first)
        for other in others:
            line, self._parts = b"".join(self._parts), [other]
            with suppress(ValueError, RecursionError):
                yield from_line(line)
