"""An agent in another process, which may be on another machine, at this end of its channel."""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias

from accelerate_nb.launching.node_agent.agent import Report
from accelerate_nb.launching.node_agent.agent_loop import AgentLoop
from accelerate_nb.transport.protocol.agent_messages import (
    AgentLost,
    CloseGroup,
    GroupClosed,
    QueryRankCollectives,
    QueryRankStacks,
    RankCollectives,
    RankEvent,
    RankExited,
    RankHeld,
    RankOutcome,
    RankOutput,
    RankStacks,
    RankTaskReply,
    StartWorkers,
)
from accelerate_nb.transport.protocol.channel import Channel, ReceivedMessage
from accelerate_nb.transport.protocol.message import Message

_RankReport: TypeAlias = RankEvent | RankOutput | RankHeld | RankTaskReply | RankOutcome | RankExited
# How long an agent may take for a query, and to report the last of its workers once they have ended, in seconds.
_QUERY_TIMEOUT = 5.0
_CLOSE_TIMEOUT = 15.0


class RemoteAgent:
    """
    One group of workers of an agent whose process is at the other end of `channel`; another group can use the channel after it.

    What comes is read in a thread of its own, so that neither end ever waits for the other to read.
    """

    def __init__(self, channel: Channel, loop: AgentLoop, report: Report) -> None:
        self._channel, self._loop, self._report = channel, loop, report
        self.ranks: tuple[int, ...] = ()
        self._arrived: deque[ReceivedMessage] = deque()
        self._queries: dict[int, queue.SimpleQueue[dict[int, Any]]] = {}
        self._numbers = itertools.count()
        self._closed = threading.Event()
        self._is_closing = False
        self._thread: threading.Thread | None = None

    @property
    def takes_sockets(self) -> bool:
        """Whether its workers can inherit a socket of this process."""
        return self._channel.passes_descriptors

    def start(self, request: StartWorkers, descriptors: Sequence[int]) -> None:
        """Have workers started."""
        self.ranks = request.ranks
        self._thread = threading.Thread(target=self._receive, name="accelerate_nb agent", daemon=True)
        self._thread.start()
        self._channel.try_send(request, descriptors)

    def tick(self, now: float, timeout: float) -> float:
        """Report what has come; it ends a wait by itself."""
        while self._arrived:
            message, descriptors = self._arrived.popleft()
            self._report(message, descriptors)
        return timeout

    def carry_out(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Have a message of the worker group carried out; where the agent has gone, its loss is reported."""
        self._channel.try_send(message, descriptors)

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """The stack dump of each of these ranks that has not ended; empty where a rank or the agent sends none."""
        number = next(self._numbers)
        return {**dict.fromkeys(ranks, ""), **self._reply_to(QueryRankStacks(number, tuple(ranks)), number)}

    def collectives(self, ranks: Sequence[int]) -> dict[int, Any]:
        """The collectives that are under way in each of these ranks, as far as it replies in time."""
        number = next(self._numbers)
        return self._reply_to(QueryRankCollectives(number, tuple(ranks)), number)

    def drain(self) -> None:
        """Report what is left; the processes have ended."""
        self._close_group()
        self.tick(time.monotonic(), 0.0)

    def close(self) -> None:
        """Have whatever still runs ended; a connection whose agent does not reply is ended, too."""
        if self._thread is None:
            return
        if not self._close_group():
            self._channel.shutdown()
        self._thread.join()
        for _, descriptors in self._arrived:
            for descriptor in descriptors:
                os.close(descriptor)

    def _close_group(self) -> bool:
        """Have the agent end its group; whether it has, or has gone."""
        if not self._is_closing:
            self._is_closing = True
            self._channel.try_send(CloseGroup())
        return self._closed.wait(_CLOSE_TIMEOUT)

    def _reply_to(self, query: Message, number: int) -> dict[int, Any]:
        box: queue.SimpleQueue[dict[int, Any]] = queue.SimpleQueue()
        self._queries[number] = box
        try:
            is_sent = not self._closed.is_set() and self._channel.try_send(query)
            return box.get(timeout=_QUERY_TIMEOUT) if is_sent else {}
        except queue.Empty:
            return {}
        finally:
            del self._queries[number]

    # ------------------------------------------------------------------------------------------- the thread that reads

    def _receive(self) -> None:
        is_closed = False
        while not is_closed and (received := self._next()) is not None:
            match received.message:
                case GroupClosed():
                    is_closed = True
                case RankStacks(number, stacks):
                    self._on_reply(number, stacks)
                case RankCollectives(number, collectives):
                    self._on_reply(number, {rank: list(entries) for rank, entries in collectives.items()})
                case AgentLost():
                    self._on_report(received)
                case message if isinstance(message, _RankReport) and message.rank in self.ranks:
                    self._on_report(received)
                case _:
                    self._channel.refuse(received)
        if not is_closed:
            why = (
                str(self._channel.last_error or "") if self._channel.refused["version"] else "its connection has ended"
            )
            self._on_report(
                ReceivedMessage(AgentLost(self.ranks, f"the agent of their node was lost: {why}", time.time()))
            )
        self._closed.set()

    def _next(self) -> ReceivedMessage | None:
        try:
            return self._channel.receive()
        except OSError:
            return None

    def _on_report(self, received: ReceivedMessage) -> None:
        self._arrived.append(received)
        self._loop.wake()

    def _on_reply(self, number: int, found: Any) -> None:
        if (box := self._queries.get(number)) is not None:
            box.put({int(rank): reply for rank, reply in found.items()})
