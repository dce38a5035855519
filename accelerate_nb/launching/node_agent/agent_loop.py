"""The loop in which agents wait for whatever happens on their node, or comes from it."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Protocol


class _Readable(Protocol):
    def fileno(self) -> int:
        """Its descriptor."""


class AgentLoop:
    """
    Calls a handler for each descriptor that becomes readable, in the thread that calls `wait`; `wake` may be called from any.

    >>> with AgentLoop() as loop:
    ...     loop.register(channel, on_message)
    ...     loop.wait(0.02)
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._waker_far, self._waker = socket.socketpair()
        for end in (self._waker_far, self._waker):
            end.setblocking(False)
        self.register(self._waker_far, lambda: self._waker_far.recv(4096))

    def __enter__(self) -> AgentLoop:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._selector.close()
        self._waker_far.close()
        self._waker.close()

    def register(self, readable: int | _Readable, handler: Callable[[], object]) -> None:
        """Call `handler` whenever a descriptor is readable."""
        self._selector.register(readable, selectors.EVENT_READ, handler)

    def unregister(self, readable: int | _Readable) -> None:
        """Watch a descriptor no longer, where it is watched."""
        with suppress(KeyError, ValueError):
            self._selector.unregister(readable)

    def is_registered(self, readable: int | _Readable) -> bool:
        """Whether a descriptor is watched."""
        return readable in self._selector.get_map()

    def wait(self, timeout: float | None) -> None:
        """Call the handlers of what is readable, or becomes so within so many seconds."""
        for key, _ in self._selector.select(timeout):
            # another's handler may have unregistered it
            if self._selector.get_map().get(key.fd) is key:
                key.data()

    def wake(self) -> None:
        """End a `wait`."""
        # where it is full, or its reader has gone, nobody needs to be woken
        with suppress(OSError):
            self._waker.send(b"\n")
