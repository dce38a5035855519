"""An agent in another process, which may be on another machine, at this end of its channel."""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from msgspec import structs

from accelerate_nb.config.rank_lists import of_ranks
from accelerate_nb.events.model import (
    Event,
    HeldAt,
    NodeRanks,
    TaskDone,
)
from accelerate_nb.launching.node_agent.agent import Report
from accelerate_nb.launching.node_agent.agent_loop import AgentLoop
from accelerate_nb.launching.node_agent.channel_reader import ChannelReader
from accelerate_nb.launching.node_agent.node_logs import with_gap
from accelerate_nb.transport.channel import (
    Channel,
    ReceivedMessage,
)
from accelerate_nb.transport.messages import (
    AgentLost,
    CloseGroup,
    GroupClosed,
    Heartbeat,
    Message,
    NodeLoad,
    QueryRankCollectives,
    QueryRankStacks,
    RankCollectives,
    RankEvent,
    RankExited,
    RankOutcome,
    RankOutput,
    RankReports,
    RankStacks,
    RankTaskReply,
    StartWorkers,
)

AnyEvent = TypeVar("AnyEvent", bound=Event)
_RankReport: TypeAlias = RankEvent | RankOutput | RankTaskReply | RankOutcome | RankExited
# How long an agent may take for a query, and to report the last of its workers once they have ended, in seconds.
_QUERY_TIMEOUT = 5.0
_CLOSE_TIMEOUT = 15.0
# An agent that sends nothing for so long is lost, in seconds.
_SILENCE_LIMIT = 4.0


@dataclass(frozen=True, slots=True)
class NodeLink:
    """
    The node at the other end of a channel: its name for people, and by how many seconds its clock is ahead of this machine's.

    `release` gets the channel back, with whether it may be used again. `inherits_environment`: its workers have the node's own.
    A node from which nothing comes for `silence_limit` seconds is lost. With a `log_folder` ranks' whole logs stay there, in a folder of
    that name. The nodes of a run share its `reader`.
    """

    name: str = "their node"
    clock_offset: float = 0.0
    inherits_environment: bool = False
    release: Callable[[bool], None] = lambda _: None
    silence_limit: float = _SILENCE_LIMIT
    log_folder: str = ""
    reader: ChannelReader = field(default_factory=ChannelReader)


class RemoteAgent:
    """
    One group of workers of an agent whose process is at the other end of `channel`; another group can use the channel after it.

    What comes is read in the thread of its node's `reader`. An agent from which nothing comes for some seconds is lost, and so is one
    whose connection has ended.
    """

    has_outcomes = True

    def __init__(self, channel: Channel, loop: AgentLoop, report: Report, node: NodeLink | None = None) -> None:
        self._channel, self._loop, self._report = channel, loop, report
        self._node = node or NodeLink()
        self.ranks: tuple[int, ...] = ()
        self._arrived: deque[ReceivedMessage] = deque()
        self._queries: dict[int, queue.SimpleQueue[dict[int, Any]]] = {}
        self._numbers = itertools.count()
        self._closed = threading.Event()
        self._is_closing = self._is_lost = False

    @property
    def takes_sockets(self) -> bool:
        """Whether its workers can inherit a socket of this process."""
        return self._channel.passes_descriptors

    def start(self, request: StartWorkers, descriptors: Sequence[int]) -> None:
        """Have workers started."""
        self._begin(request.ranks)
        node = self._node
        request = structs.replace(request, inherits_environment=node.inherits_environment, log_folder=node.log_folder)
        self._channel.try_send(request, descriptors)

    def _begin(self, ranks: tuple[int, ...]) -> None:
        """Read what comes about these ranks."""
        self.ranks = ranks
        self._node.reader.read(self._channel, self._take, self._on_end, self._node.silence_limit)

    def tick(self, now: float, timeout: float) -> float:
        """Report what has come, after which nobody waits: what follows from it is due. What comes ends a wait by itself."""
        has_come = bool(self._arrived)
        while self._arrived:
            message, descriptors = self._arrived.popleft()
            self._report(message, descriptors)
        return 0.0 if has_come else timeout

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
        if not self.ranks:
            self._node.release(True)
            return
        if not self._close_group():
            self._channel.shutdown()
            self._closed.wait(_CLOSE_TIMEOUT)
        self._node.release(not self._is_lost)
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

    def _on_end(self, reason: str | None) -> None:
        """The last message has come or, for a reason, none will."""
        if reason is not None:
            self._is_lost = True
            text = f"the agent of {self._node.name} ({of_ranks(self.ranks)}) was lost: {reason}"
            self._on_report(ReceivedMessage(AgentLost(self.ranks, text, time.time())))
        self._closed.set()

    def _take(self, received: ReceivedMessage) -> bool:
        """Take what has come; whether it was the last of the group."""
        match received.message:
            case GroupClosed():
                return True
            case Heartbeat():
                pass
            case RankStacks(number, stacks):
                self._on_reply(number, stacks)
            case RankCollectives(number, collectives):
                self._on_reply(number, {rank: list(entries) for rank, entries in collectives.items()})
            case NodeLoad(sample, devices):
                offset = self._node.clock_offset
                load = NodeLoad(_dated(sample, offset), tuple(_dated(device, offset) for device in devices))
                self._on_report(ReceivedMessage(load))
            case RankReports(reports):
                for report in reports:
                    self._take_report(ReceivedMessage(report))
            case _:
                self._take_report(received)
        return False

    def _take_report(self, received: ReceivedMessage) -> None:
        """Take a report about one of the ranks; anything else is refused."""
        message, descriptors = received
        if isinstance(message, AgentLost):
            text = f"the workers of {self._node.name} ({of_ranks(message.ranks)}) were lost: {message.reason}"
            self._on_report(ReceivedMessage(structs.replace(message, reason=text)))
        elif isinstance(message, _RankReport) and message.rank in self.ranks:
            if isinstance(message, RankOutput) and message.left_out:
                message = with_gap(message, self._node.name)
            self._on_report(ReceivedMessage(self._with_our_time(message), descriptors))
        else:
            self._channel.refuse(received)

    def _with_our_time(self, report: _RankReport) -> Message:
        """A report as a clock of this machine would have dated it."""
        offset = self._node.clock_offset
        if not offset:
            return report
        match report:
            case RankEvent(_, _, event):
                return structs.replace(report, event=_dated(event, offset))
            case RankOutput(_, _, _, lines):
                return structs.replace(
                    report, lines=tuple(structs.replace(line, time=line.time - offset) for line in lines)
                )
            case RankExited():
                return structs.replace(report, time=report.time - offset)
        return report

    def _on_report(self, received: ReceivedMessage) -> None:
        self._arrived.append(received)
        if len(self._arrived) == 1:
            # `tick` takes whatever follows until there is nothing left
            self._loop.wake()

    def _on_reply(self, number: int, found: Any) -> None:
        if (box := self._queries.get(number)) is not None:
            box.put({int(rank): reply for rank, reply in found.items()})


def _dated(event: AnyEvent, offset: float) -> AnyEvent:
    return (
        event if isinstance(event, (NodeRanks, TaskDone, HeldAt)) else structs.replace(event, time=event.time - offset)
    )
