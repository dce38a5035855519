"""The kernel's messages to a worker while its function runs, received in a thread of their own."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from accelerate_nb.rank_local import RankLocal
from accelerate_nb.transport.fd_messages import receive_message, send_message

Message: TypeAlias = dict[str, Any]
Handler: TypeAlias = Callable[[Message, Sequence[int]], None]


class ControlChannel:
    """
    A worker's end of its socket: handlers are called with each message of their kind, in the inbox's thread.

    A handler is quick and raises nothing; it gets the message and the descriptors that came with it, which it closes. A
    message without a handler is kept for one that is registered later.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        self._handlers: dict[str, Handler] = {}
        self._waiting: list[tuple[Message, Sequence[int]]] = []
        self._leave = threading.Event()
        threading.Thread(target=self._receive, name="accelerate_nb inbox", daemon=True).start()

    def on(self, kind: str, handler: Handler) -> None:
        """Send messages of this kind to `handler` from now on; those that came before go to it at once."""
        with self._lock:
            self._handlers[kind] = handler
            due = [waiting for waiting in self._waiting if waiting[0]["do"] == kind]
            self._waiting = [waiting for waiting in self._waiting if waiting[0]["do"] != kind]
        for message, descriptors in due:
            handler(message, descriptors)

    def wait_for_leave(self) -> None:
        """Wait until the kernel reports that all ranks have returned, or has gone."""
        self._leave.wait()

    def _receive(self) -> None:
        while (received := self._next()) is not None:
            self._take(*received)
        self._leave.set()

    def _next(self) -> tuple[Message, Sequence[int]] | None:
        try:
            return receive_message(self._socket)
        except OSError:
            # the notebook's process has gone, and this one is about to be ended
            return None

    def _take(self, message: Message, descriptors: Sequence[int]) -> None:
        if message["do"] == "leave":
            self._leave.set()
            return
        with self._lock:
            handler = self._handlers.get(message["do"])
            if handler is None:
                self._waiting.append((message, descriptors))
        if handler is not None:
            handler(message, descriptors)


def try_send(sock: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> bool:
    """
    The kernel's side: send one message (`do` is its kind), with copies of descriptors; whether it could be delivered.

    The socket doesn't wait, so a message is short: what may be long goes into a memory file of its own.
    """
    try:
        send_message(sock, dict(message), descriptors)
    except OSError:
        return False
    return True


_inbox: RankLocal[ControlChannel | None] = RankLocal(lambda: None)


def connect(inbox: ControlChannel | None) -> None:
    """Make this the process's inbox; processes that it forks have none, since the thread stays here."""
    _inbox.set(inbox)
    if inbox is not None:
        os.register_at_fork(after_in_child=lambda: connect(None))


def current_inbox() -> ControlChannel | None:
    """The process's inbox; `None` where there is no kernel."""
    return _inbox.get()
