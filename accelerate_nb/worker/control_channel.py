"""The kernel's messages to a worker while its function runs, received in a thread of their own."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from accelerate_nb.rank_local import RankLocal
from accelerate_nb.transport.channel import (
    Channel,
    ReceivedMessage,
)
from accelerate_nb.transport.messages import (
    LeaveGroup,
    Message,
)

# A handler gets the message, and its descriptors, which it closes.
Handler: TypeAlias = Callable[[Any, Sequence[int]], None]


class ControlChannel:
    """
    A worker's end of its socket: handlers are called with each message of their class, in the inbox's thread.

    A handler is quick and raises nothing. A message without a handler is kept for one that is registered later.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._channel = Channel(sock)
        self._lock = threading.Lock()
        self._handlers: dict[type[Message], Handler] = {}
        self._waiting: list[ReceivedMessage] = []
        self._leave = threading.Event()
        threading.Thread(target=self._receive, name="accelerate_nb inbox", daemon=True).start()

    def on(self, message_class: type[Message], handler: Handler) -> None:
        """Hand messages of this class to `handler` from now on; those that came before go to it at once."""
        with self._lock:
            self._handlers[message_class] = handler
            due = [waiting for waiting in self._waiting if type(waiting.message) is message_class]
            self._waiting = [waiting for waiting in self._waiting if type(waiting.message) is not message_class]
        for message, descriptors in due:
            handler(message, descriptors)

    def wait_for_leave(self) -> None:
        """Wait until the kernel reports that all ranks have returned, or has gone."""
        self._leave.wait()

    def _receive(self) -> None:
        while (received := self._next()) is not None:
            self._take(received)
        self._leave.set()

    def _next(self) -> ReceivedMessage | None:
        try:
            return self._channel.receive()
        except OSError:
            # the notebook's process has gone, and this one is about to be ended
            return None

    def _take(self, received: ReceivedMessage) -> None:
        if isinstance(received.message, LeaveGroup):
            self._leave.set()
            return
        with self._lock:
            handler = self._handlers.get(type(received.message))
            if handler is None:
                self._waiting.append(received)
        if handler is not None:
            handler(*received)


_inbox: RankLocal[ControlChannel | None] = RankLocal(lambda: None)


def connect(inbox: ControlChannel | None) -> None:
    """Make this the process's inbox; processes that it forks have none, since the thread stays here."""
    _inbox.set(inbox)
    if inbox is not None:
        os.register_at_fork(after_in_child=lambda: connect(None))


def current_inbox() -> ControlChannel | None:
    """The process's inbox; `None` where there is no kernel."""
    return _inbox.get()
