"""Nodes that come to a rendezvous whose run goes on already: they are checked, and wait until its ranks start again with them."""

from __future__ import annotations

import select
import socket
import threading
from typing import NamedTuple, Protocol

from accelerate_nb.errors import LaunchError
from accelerate_nb.launching.rendezvous.join_requests import JoiningNode, JoinRequests
from accelerate_nb.launching.rendezvous.peers import HeartbeatThread
from accelerate_nb.transport.messages import HEARTBEAT_INTERVAL

# How long the end of a run waits for a check that is under way, in seconds.
_END_TIMEOUT = 1.0


class CheckedNode(NamedTuple):
    """A node that fits the run, and by how many seconds its clock is ahead of this machine's."""

    node: JoiningNode
    clock_offset: float


class GrowingRun(Protocol):
    """The nodes of a run, to which others may come."""

    def check_newcomer(self, node: JoiningNode, waiting: int) -> float | None:
        """
        Check a node, beside so many that wait already, and return by how many seconds its clock is ahead.

        `None` where it can't be checked yet. Raises `LaunchError` where it does not fit.
        """

    def on_newcomer(self) -> None:
        """One more node waits."""


class LateNodes:
    """
    Listens for nodes that come late, in a thread of its own; nobody is disturbed before one has passed all checks of `run`.

    >>> late = LateNodes(run, requests, listener, heartbeats)
    >>> late.start()
    >>> nodes = late.take()
    """

    def __init__(
        self, run: GrowingRun, requests: JoinRequests, listener: socket.socket, heartbeats: HeartbeatThread
    ) -> None:
        self._run, self._requests, self._listener, self._heartbeats = run, requests, listener, heartbeats
        self._lock = threading.Lock()
        self._unchecked: list[JoiningNode] = []
        self._waiting: list[CheckedNode] = []
        self._over = threading.Event()
        self._waker_far, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="accelerate_nb late nodes", daemon=True)

    @property
    def are_there(self) -> bool:
        """Whether nodes wait."""
        return bool(self._waiting)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def take(self) -> list[CheckedNode]:
        """The nodes that wait, which are the caller's from now on."""
        with self._lock:
            found, self._waiting = self._waiting, []
            return found

    def close(self) -> None:
        """Listen no more, and refuse those that wait."""
        self._over.set()
        self._waker.send(b"\n")
        self._thread.join(_END_TIMEOUT)
        self._listener.close()
        self._requests.refuse_all("")
        for node in (*self._unchecked, *(checked.node for checked in self.take())):
            node.refuse("the run has ended meanwhile")

    # ------------------------------------------------------------------------------------------- the thread that listens

    def _serve(self) -> None:
        while not self._over.is_set():
            sockets = [node.sock for node in (*self._unchecked, *(checked.node for checked in self._waiting))]
            watched = [self._waker_far, self._listener, *self._requests.sockets, *sockets]
            readable = select.select(watched, (), (), HEARTBEAT_INTERVAL)[0]
            if self._over.is_set():
                return
            if self._listener in readable:
                self._requests.accept(self._listener)
            self._drop(readable)
            for sock in [sock for sock in self._requests.sockets if sock in readable]:
                if (node := self._requests.read(sock)) is not None:
                    self._heartbeats.add(node.channel)
                    self._unchecked.append(node)
            self._requests.refuse_expired()
            for node in list(self._unchecked):
                self._check(node)

    def _drop(self, readable: list[socket.socket]) -> None:
        """Drop those that have gone: they say nothing before they are answered."""
        with self._lock:
            gone = [checked.node for checked in self._waiting if checked.node.sock in readable]
            self._waiting = [checked for checked in self._waiting if checked.node not in gone]
        gone += [node for node in self._unchecked if node.sock in readable]
        self._unchecked = [node for node in self._unchecked if node not in gone]
        for node in gone:
            node.channel.close()

    def _check(self, node: JoiningNode) -> None:
        try:
            offset = self._run.check_newcomer(node, len(self._waiting))
        except LaunchError as error:
            self._unchecked.remove(node)
            node.refuse(str(error).rstrip("."))
            return
        if offset is None:
            return
        self._unchecked.remove(node)
        with self._lock:
            self._waiting.append(CheckedNode(node, offset))
        self._run.on_newcomer()
