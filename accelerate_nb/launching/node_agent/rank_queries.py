"""Messages and queries to the ranks of a worker group: stacks, collectives, and whatever a rank replies to."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from accelerate_nb.errors import ProtocolError
from accelerate_nb.failures.stack_dumps import SIGNAL, dumps_since, lengths, read_replies
from accelerate_nb.launching.engines.base import Workers
from accelerate_nb.transport.channel import message_of
from accelerate_nb.transport.connection import Connection
from accelerate_nb.transport.messages import (
    CollectivesReply,
    Message,
    QueryCollectives,
)

_READ_AT_ONCE = 1 << 20


class RankQueries:
    """
    Sends messages to ranks over their `connections`, and reads their replies.

    `connected` are the ranks that have sent something; others are not ready for a query.
    """

    def __init__(self, connections: Mapping[int, Connection], connected: Collection[int]) -> None:
        self._connections, self._connected = connections, connected
        self._stacks_lock = threading.Lock()
        self._closed = False

    def send(self, rank: int, message: Message, descriptors: Sequence[int] = ()) -> bool:
        """Send a message to a worker's inbox; whether it could be delivered."""
        return self._connections[rank].inbox.try_send(message, descriptors)

    def stacks(self, running: Sequence[int], workers: Workers) -> dict[int, str]:
        """The stack dump of each of these ranks; empty where one sends none."""
        with self._stacks_lock:
            if self._closed:
                return {}
            # a process that has not sent anything yet is not ready for the signal, and would be ended by it
            ranks = [rank for rank in running if rank in self._connected]
            files = [self._connections[rank].stacks for rank in ranks]
            before = lengths(files)
            workers.signal(SIGNAL, ranks)
            return {**dict.fromkeys(running, ""), **dict(zip(ranks, dumps_since(files, before), strict=True))}

    def collectives(self, ranks: Iterable[int]) -> dict[int, Any]:
        """The collectives that are under way in each rank, as far as it replies in time."""
        with self._stacks_lock:
            pipes: dict[int, int] = {}
            for rank in ranks:
                if rank not in self._connected or self._closed:
                    continue
                pipes[rank], its = os.pipe()
                self.send(rank, QueryCollectives(), [its])
                os.close(its)
            replies = {rank: _message(data) for rank, data in read_replies(pipes).items()}
        return {rank: list(reply.entries) for rank, reply in replies.items() if isinstance(reply, CollectivesReply)}

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Within the block, and after it, nothing more is sent."""
        with self._stacks_lock:
            self._closed = True
            yield


def _message(data: bytes) -> Message | None:
    """A rank's reply; `None` where it left none, or what is none."""
    try:
        return message_of(data)
    except ProtocolError:
        return None
