"""An agent in another process, which may be on another machine, at this end of its channel."""

import itertools
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from msgspec import structs

from accelerate_nb.config.rank_lists import of_ranks
from accelerate_nb.events.event_types import Event, HeldAt, NodeRanks, TaskDone
from accelerate_nb.failures.hang_report import StackSnapshot
from accelerate_nb.launching.node_agent.agent import Agent, AgentLoop, Report
from accelerate_nb.launching.node_agent.node_logs import with_gap
from accelerate_nb.transport import messages
from accelerate_nb.transport.channel import Channel, ReceivedMessage, is_ready

# More channels than so many are read at most every `_BETWEEN_READS` seconds: to wake for each of their messages costs more than they do.
_FEW = 8
_BETWEEN_READS = 0.02
AnyEvent = TypeVar("AnyEvent", bound=Event)
# How long an agent may take for a query, and to report the last of its workers once they have ended, in seconds.
_QUERY_TIMEOUT = 5.0
_CLOSE_TIMEOUT = 15.0
# An agent that sends nothing for so long is lost, in seconds.
_SILENCE_LIMIT = 4.0


@dataclass(eq=False, slots=True)
class _Reading:
    """One channel that is read, and when something last came from it."""

    channel: Channel
    take: Callable[[ReceivedMessage], bool]
    end: Callable[[str | None], None]
    silence_limit: float
    heard_at: float


class ChannelReader:
    """Reads channels in one thread, from the first to the last of them, so that neither end ever waits for the other to read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._added: list[_Reading] = []
        self._thread: threading.Thread | None = None
        # while the thread runs
        self._loop: AgentLoop | None = None
        self._readings: set[_Reading] = set()

    def read(
        self,
        channel: Channel,
        take: Callable[[ReceivedMessage], bool],
        end: Callable[[str | None], None],
        silence_limit: float,
    ) -> None:
        """Have `take` get what comes over a channel, in the thread, until it returns `True`, and send heartbeats meanwhile."""
        # `end` is called once after it, there too: with `None`, or a reason where the channel has ended or was silent for `silence_limit` seconds
        with self._lock:
            self._added.append(_Reading(channel, take, end, silence_limit, time.monotonic()))
            if self._loop is None:
                self._loop = AgentLoop()
                self._thread = threading.Thread(
                    target=self._run, args=(self._loop,), name="accelerate_nb nodes", daemon=True
                )
                self._thread.start()
            self._loop.wake()

    def join(self) -> None:
        """Wait until the thread and its sockets have gone, where it has nothing to read any more."""
        with self._lock:
            thread = None if self._added or self._readings else self._thread
        if thread is not None:
            thread.join(_CLOSE_TIMEOUT)

    def _run(self, loop: AgentLoop) -> None:
        due = time.monotonic() + messages.HEARTBEAT_INTERVAL
        with closing(loop):
            while True:
                with self._lock:
                    added, self._added = self._added, []
                    if not added and not self._readings:
                        self._loop = None
                        return
                for reading in added:
                    self._readings.add(reading)
                    # the one that read it before may have left something
                    self._read(loop, reading)
                    if reading in self._readings:
                        loop.register(reading.channel, partial(self._read, loop, reading))
                began = time.monotonic()
                loop.wait(max(0.0, due - began))
                if (now := time.monotonic()) >= due:
                    due = self._check(loop, now)
                if len(self._readings) > _FEW:
                    time.sleep(max(0.0, began + _BETWEEN_READS - now))

    def _read(self, loop: AgentLoop, reading: _Reading) -> None:
        reading.heard_at = time.monotonic()
        channel = reading.channel
        try:
            for received in channel.receive_ready():
                if reading.take(received):
                    self._end(loop, reading, None)
                    return
        except OSError as error:
            self._end(loop, reading, f"its connection has ended: {error}")
            return
        if channel.is_ended or channel.is_closed:
            self._end(loop, reading, str(channel.error or "its connection has ended"))

    def _check(self, loop: AgentLoop, now: float) -> float:
        """Send heartbeats, and end the channels that are silent; returns when to check again."""
        due = now + messages.HEARTBEAT_INTERVAL
        for reading in list(self._readings):
            if reading.channel.is_closed:
                self._end(loop, reading, "its connection was closed")
            elif reading.heard_at + reading.silence_limit > now or is_ready(reading.channel.fileno(), 0):
                reading.channel.send_at_once(messages.Heartbeat())
                due = min(due, max(reading.heard_at + reading.silence_limit, now + _BETWEEN_READS))
            else:
                text = f"nothing came for {reading.silence_limit:g} s: its machine or the agent was stopped, or the network between was cut"
                # nobody may wait any longer until it takes a message
                reading.channel.shutdown()
                self._end(loop, reading, text)
        return due

    def _end(self, loop: AgentLoop, reading: _Reading, reason: str | None) -> None:
        loop.unregister(reading.channel)
        self._readings.discard(reading)
        reading.end(reason)


class RemoteAgent(Agent):
    """One group of workers of an agent at the other end of `channel`, whose next group comes after it; `release` gets the channel back."""

    # What comes is read in the thread of `reader`, which the nodes of a run share. `clock_offset`: by how many seconds its clock is ahead.

    def __init__(
        self,
        channel: Channel,
        loop: AgentLoop,
        report: Report,
        *,
        name: str = "their node",
        clock_offset: float = 0.0,
        inherits_environment: bool = False,
        release: Callable[[bool], None] = lambda _: None,
        log_folder: str = "",
        reader: ChannelReader | None = None,
    ) -> None:
        self._channel, self._loop, self._report = channel, loop, report
        self._name, self._clock_offset, self._release = name, clock_offset, release
        self._inherits_environment, self._log_folder = inherits_environment, log_folder
        self._reader = reader or ChannelReader()
        self._arrived: deque[ReceivedMessage] = deque()
        self._queries: dict[int, queue.SimpleQueue[StackSnapshot]] = {}
        self._numbers = itertools.count()
        self._closed = threading.Event()
        self._is_closing = self._is_lost = False
        self.takes_sockets = channel.passes_descriptors

    def start(self, request: messages.StartWorkers, descriptors: Sequence[int]) -> None:
        self.ranks = request.ranks
        self._reader.read(self._channel, self._take, self._on_end, _SILENCE_LIMIT)
        request = structs.replace(request, inherits_environment=self._inherits_environment, log_folder=self._log_folder)
        self._channel.try_send(request, descriptors)

    def tick(self, now: float, timeout: float) -> float:
        """Report what has come, after which nobody waits: what follows from it is due. What comes ends a wait by itself."""
        has_come = bool(self._arrived)
        while self._arrived:
            message, descriptors = self._arrived.popleft()
            self._report(message, descriptors)
        return 0.0 if has_come else timeout

    def carry_out(self, message: messages.Message, descriptors: Sequence[int] = ()) -> None:
        """Have a message of the worker group carried out; where the agent has gone, its loss is reported."""
        self._channel.try_send(message, descriptors)

    def snapshot(self, ranks: Sequence[int]) -> StackSnapshot:
        """The stack dump of each of these ranks that has not ended, empty where the agent sends none, and its collectives."""
        number, found = next(self._numbers), StackSnapshot({}, {})
        box = self._queries[number] = queue.SimpleQueue[StackSnapshot]()
        try:
            with suppress(queue.Empty):
                if not self._closed.is_set() and self._channel.try_send(messages.QueryRankStacks(number, tuple(ranks))):
                    found = box.get(timeout=_QUERY_TIMEOUT)
        finally:
            del self._queries[number]
        return StackSnapshot({**dict.fromkeys(ranks, ""), **found.replies}, found.collectives)

    def drain(self) -> None:
        self._close_group()
        self.tick(time.monotonic(), 0.0)

    def close(self) -> None:
        """Have whatever still runs ended; a connection whose agent does not reply is ended, too."""
        if not self.ranks:
            self._release(True)
            return
        if not self._close_group():
            self._channel.shutdown()
            self._closed.wait(_CLOSE_TIMEOUT)
        self._reader.join()
        self._release(not self._is_lost)
        for _, descriptors in self._arrived:
            for descriptor in descriptors:
                os.close(descriptor)

    def _close_group(self) -> bool:
        """Have the agent end its group; whether it has, or has gone."""
        if not self._is_closing:
            self._is_closing = True
            self._channel.try_send(messages.CloseGroup())
        return self._closed.wait(_CLOSE_TIMEOUT)

    # ------------------------------------------------------------------------------------------- the thread that reads

    def _on_end(self, reason: str | None) -> None:
        """The last message has come or, for a reason, none will."""
        if reason is not None:
            self._is_lost = True
            text = f"the agent of {self._name} ({of_ranks(self.ranks)}) was lost: {reason}"
            self._on_report(ReceivedMessage(messages.AgentLost(self.ranks, text, time.time())))
        self._closed.set()

    def _take(self, received: ReceivedMessage) -> bool:
        """Take what has come; whether it was the last of the group."""
        match received.message:
            case messages.GroupClosed():
                return True
            case messages.Heartbeat():
                pass
            case messages.RankStacks(number, stacks, collectives):
                if (box := self._queries.get(number)) is not None:
                    box.put(
                        StackSnapshot(
                            {int(rank): text for rank, text in stacks.items()},
                            {int(rank): list(entries) for rank, entries in collectives.items()},
                        )
                    )
            case messages.NodeLoad(sample, devices):
                offset = self._clock_offset
                load = messages.NodeLoad(_dated(sample, offset), tuple(_dated(device, offset) for device in devices))
                self._on_report(ReceivedMessage(load))
            case messages.RankReports(reports):
                for report in reports:
                    self._take_report(ReceivedMessage(report))
            case _:
                self._take_report(received)
        return False

    def _take_report(self, received: ReceivedMessage) -> None:
        """Take a report about one of the ranks; anything else is refused."""
        message, descriptors = received
        if isinstance(message, messages.AgentLost):
            text = f"the workers of {self._name} ({of_ranks(message.ranks)}) were lost: {message.reason}"
            self._on_report(ReceivedMessage(structs.replace(message, reason=text)))
        elif isinstance(message, messages.NumberedReport) and message.rank in self.ranks:
            if isinstance(message, messages.RankOutput) and message.left_out:
                message = with_gap(message, self._name)
            self._on_report(ReceivedMessage(self._with_our_time(message), descriptors))
        else:
            self._channel.refuse(received)

    def _with_our_time(self, report: messages.NumberedReport) -> messages.Message:
        """A report as a clock of this machine would have dated it."""
        offset = self._clock_offset
        if not offset:
            return report
        match report:
            case messages.RankEvent(_, _, event):
                return structs.replace(report, event=_dated(event, offset))
            case messages.RankOutput(_, _, _, lines):
                return structs.replace(
                    report, lines=tuple(structs.replace(line, time=line.time - offset) for line in lines)
                )
            case messages.RankExited():
                return structs.replace(report, time=report.time - offset)
        return report

    def _on_report(self, received: ReceivedMessage) -> None:
        self._arrived.append(received)
        if len(self._arrived) == 1:
            # `tick` takes whatever follows until there is nothing left
            self._loop.wake()


def _dated(event: AnyEvent, offset: float) -> AnyEvent:
    return (
        event if isinstance(event, (NodeRanks, TaskDone, HeldAt)) else structs.replace(event, time=event.time - offset)
    )
