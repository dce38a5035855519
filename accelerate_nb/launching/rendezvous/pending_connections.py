"""The connections at a listening socket that have not shown yet whose they are: few, for a short time."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from accelerate_nb.launching.rendezvous.peers import probe_connection

# Connections that have sent nothing yet: so many may wait, each for so many seconds. A port that others reach meets strangers.
_MOST_PENDING = 128
PENDING_TIMEOUT = 10.0


class _Closable(Protocol):
    def close(self) -> None:
        """Close the connection."""


PendingState = TypeVar("PendingState", bound=_Closable)


class PendingConnections(Generic[PendingState]):
    """
    New connections, each with what `begin` makes of it, until they are taken or refused; `refused` counts the latter.

    >>> pending = PendingConnections(Channel)
    >>> pending.accept(listener)
    >>> pending.refuse_expired()
    """

    def __init__(self, begin: Callable[[socket.socket], PendingState], timeout: float = PENDING_TIMEOUT) -> None:
        self.states: dict[socket.socket, PendingState] = {}
        self.refused = 0
        self._begin, self._timeout = begin, timeout
        self._since: dict[socket.socket, float] = {}

    def accept(self, listener: socket.socket) -> None:
        """Take in one connection; one too many is closed."""
        sock = listener.accept()[0]
        if len(self.states) >= _MOST_PENDING:
            sock.close()
            return
        probe_connection(sock)
        self.states[sock], self._since[sock] = self._begin(sock), time.monotonic()

    def take(self, sock: socket.socket) -> PendingState:
        """A connection that has shown whose it is, which is the caller's from now on."""
        del self._since[sock]
        return self.states.pop(sock)

    def refuse(self, sock: socket.socket) -> None:
        """Count a connection that is none of those that are waited for, and close it."""
        self.refused += 1
        self.take(sock).close()

    def refuse_expired(self) -> None:
        """Refuse those whose time is over."""
        now = time.monotonic()
        for sock in [sock for sock, since in self._since.items() if now - since > self._timeout]:
            self.refuse(sock)

    def close(self) -> None:
        """Close all of them."""
        for sock in list(self.states):
            self.take(sock).close()
