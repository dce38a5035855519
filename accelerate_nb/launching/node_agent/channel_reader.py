"""The thread that reads the channels of a run's nodes, and sends them heartbeats."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from accelerate_nb.launching.node_agent.agent_loop import AgentLoop
from accelerate_nb.transport.channel import (
    Channel,
    ReceivedMessage,
    is_readable,
)
from accelerate_nb.transport.messages import (
    HEARTBEAT_INTERVAL,
    Heartbeat,
)

# More channels than so many are read at most every `_BETWEEN_READS` seconds: to wake for each of their messages costs more than they do.
_FEW = 8
_BETWEEN_READS = 0.02


@dataclass(eq=False, slots=True)
class _Reading:
    """One channel that is read, and when something last came from it."""

    channel: Channel
    take: Callable[[ReceivedMessage], bool]
    end: Callable[[str | None], None]
    silence_limit: float
    heard_at: float


class ChannelReader:
    """
    Reads channels in one thread, however many they are, so that neither end ever waits for the other to read.

    The thread begins with the first channel and ends with the last.

    >>> reader = ChannelReader()
    >>> reader.read(channel, take=lambda received: isinstance(received.message, GroupClosed), end=print, silence_limit=4.0)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._added: list[_Reading] = []
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
        """
        Have `take` get what comes over a channel until it returns `True`, and send heartbeats meanwhile.

        `end` is called once after it: with `None`, or with a reason where the channel has ended before, or nothing has come from it for
        `silence_limit` seconds. Both are called in the thread.
        """
        with self._lock:
            self._added.append(_Reading(channel, take, end, silence_limit, time.monotonic()))
            if self._loop is None:
                self._loop = AgentLoop()
                threading.Thread(target=self._run, args=(self._loop,), name="accelerate_nb nodes", daemon=True).start()
            self._loop.wake()

    def _run(self, loop: AgentLoop) -> None:
        due = time.monotonic() + HEARTBEAT_INTERVAL
        with loop:
            while self._has_channels(loop):
                began = time.monotonic()
                loop.wait(max(0.0, due - began))
                if (now := time.monotonic()) >= due:
                    due = self._check(loop, now)
                if len(self._readings) > _FEW:
                    time.sleep(max(0.0, began + _BETWEEN_READS - now))

    def _has_channels(self, loop: AgentLoop) -> bool:
        """Begin to read what was added; whether there is anything to read."""
        with self._lock:
            added, self._added = self._added, []
            if not added and not self._readings:
                self._loop = None
                return False
        for reading in added:
            self._readings.add(reading)
            # the one that read it before may have left something
            self._read(loop, reading)
            if reading in self._readings:
                loop.register(reading.channel, partial(self._read, loop, reading))
        return True

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
        due = now + HEARTBEAT_INTERVAL
        for reading in list(self._readings):
            if reading.channel.is_closed:
                self._end(loop, reading, "its connection was closed")
            elif reading.heard_at + reading.silence_limit > now or is_readable(reading.channel.fileno(), 0):
                reading.channel.send_at_once(Heartbeat())
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
