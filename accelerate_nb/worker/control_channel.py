"""What the kernel tells a worker while its function runs: messages that a thread of their own hears."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from accelerate_nb.launching.messages import receive_message, send_message
from accelerate_nb.own import Own

Message: TypeAlias = dict[str, Any]
Handler: TypeAlias = Callable[[Message, Sequence[int]], None]


class Inbox:
    """
    A worker's end of its socket: handlers are called with each message of their kind, in the inbox's thread.

    A handler is quick and raises nothing; it gets the message and the descriptors that came with it, which it closes. A
    message that nobody handles yet is kept for whoever asks for its kind later.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        self._handlers: dict[str, Handler] = {}
        self._waiting: list[tuple[Message, Sequence[int]]] = []
        self._leave = threading.Event()
        threading.Thread(target=self._hear, name="accelerate_nb inbox", daemon=True).start()

    def on(self, kind: str, handler: Handler) -> None:
        """From now on, messages of this kind go to `handler`; those that came before do so at once."""
        with self._lock:
            self._handlers[kind] = handler
            due = [one for one in self._waiting if one[0]["do"] == kind]
            self._waiting = [one for one in self._waiting if one[0]["do"] != kind]
        for message, descriptors in due:
            handler(message, descriptors)

    def wait_for_leave(self) -> None:
        """Wait until the kernel says that all ranks have returned, or has gone."""
        self._leave.wait()

    def _hear(self) -> None:
        while (heard := self._next()) is not None:
            self._take(*heard)
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


def tell(sock: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> bool:
    """
    The kernel's side: send one message (`do` is its kind), with copies of descriptors; whether somebody could take it.

    The socket doesn't wait, so a message is short: what may be long goes into a memory file of its own.
    """
    try:
        send_message(sock, dict(message), descriptors)
    except OSError:
        return False
    return True


class _Holder:
    """A rank's inbox."""

    inbox: Inbox | None = None


_holder = Own(_Holder)


def connect(inbox: Inbox | None) -> None:
    """Make this the process's inbox; processes that it forks have none, since the thread stays here."""
    _holder.get().inbox = inbox
    if inbox is not None:
        os.register_at_fork(after_in_child=lambda: connect(None))


def current_inbox() -> Inbox | None:
    """The process's inbox; `None` where no kernel is there to tell it anything."""
    return _holder.get().inbox
