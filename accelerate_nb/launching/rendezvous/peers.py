"""The connections between the nodes of a rendezvous."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from accelerate_nb.transport.channel import Channel
from accelerate_nb.transport.messages import (
    HEARTBEAT_INTERVAL,
    Heartbeat,
    NodeFacts,
)

# A node from which nothing comes for so long is lost, in seconds. Its notebook may compute meanwhile, which holds back its
# heartbeats: a machine that is off or cut off is found sooner, by the system's own probes.
SILENCE_LIMIT = 30.0
# What is said of a wait, comes after so many seconds.
_QUIET_WAIT = 2.0


@dataclass(frozen=True, slots=True)
class Peer:
    """
    Another node of a run: its number and its name for people, the channel to it, and how many ranks it has.

    `clock_offset`: by how many seconds its clock is ahead of this machine's.
    """

    number: int
    channel: Channel
    name: str
    size: int
    clock_offset: float = 0.0


def node_name(number: int, facts: NodeFacts) -> str:
    """The name of a node for people."""
    return f"node {number} on {facts.host}"


def probe_connection(sock: socket.socket) -> None:
    """Have the system end a connection whose other machine is off or cut off, within 4 seconds."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 1),
        ("TCP_KEEPALIVE", 1),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 4000),
    ):
        # those that this system has
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class HeartbeatThread:
    """While its block runs, these nodes know that this one is there."""

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._channels = list(channels)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._send, name="accelerate_nb heartbeat", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def add(self, channel: Channel) -> None:
        """Have one more node know, until its channel is closed."""
        self._channels = [*(known for known in self._channels if not known.is_closed), channel]

    def stop(self) -> None:
        """End."""
        self._over.set()

    def _send(self) -> None:
        while not self._over.wait(HEARTBEAT_INTERVAL):
            for channel in self._channels:
                if not channel.is_closed:
                    channel.try_send(Heartbeat())


class WaitNotice:
    """Says on standard error what is waited for, once that takes some seconds, and again whenever it changes."""

    def __init__(self) -> None:
        self._began, self._said = time.monotonic(), ""

    def say(self, text: str) -> None:
        """Say it, unless it was said."""
        if time.monotonic() - self._began > _QUIET_WAIT and text != self._said:
            self._said = text
            print_notice(text)


def print_notice(text: str) -> None:
    """Write what is waited for on standard error, at once."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
