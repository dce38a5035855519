"""The log that the nodes of a run share where each launches its part: messages in a `TCPStore`, and connections that show who is there."""

from __future__ import annotations

import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from accelerate_nb.errors import LaunchError, ProtocolError
from accelerate_nb.launching.node_agent.node_network import probe_connection
from accelerate_nb.transport.channel import decode, encode
from accelerate_nb.transport.messages import VERSION, Message, NodeLogEntry

if TYPE_CHECKING:
    from torch.distributed import TCPStore

# The keys of the store: how many entries and nodes there are, the version of the messages, and where node 0 watches the others.
_ENTRIES, _NODES, _VERSION, _PORT = (f"accelerate_nb/{name}" for name in ("entries", "nodes", "version", "port"))
# Each node looks into the log so often, in seconds.
_BETWEEN_LOOKS = 0.2
_STORE_TIMEOUT = 10.0
_CLOSE_TIMEOUT = 2.0
# A node from which nothing comes for so long is lost, in seconds. Its notebook may compute meanwhile, which holds back what it sends:
# a process that has ended shows at once, and a machine that is off or cut off within 4 seconds, by the system's own probes.
_SILENCE_LIMIT = 30.0
_NUMBER = struct.Struct("<I")

# Takes an entry of another node, in the log's thread.
OnEntry = Callable[[NodeLogEntry, Message], None]
# Takes the number of a node that has gone, and why, in the log's thread or, of node 0, in that of the connections.
OnLoss = Callable[[int, str], None]


class NodeLog:
    """
    Entries that every node of a run reads in one order; this node is the one with `number`, node 0's is 0.

    A thread looks for new ones and posts those of this node: nobody else waits for the network. Nothing in it is unpickled.

    >>> log = NodeLog.hosted(listener)
    >>> log.start(on_entry, on_loss)
    >>> log.post(RequestStop("finish"))
    """

    def __init__(self, store: TCPStore, number: int, peers: PeerConnections) -> None:
        self.number, self.peers = number, peers
        self._store: Any = store
        # a node that comes late is of no attempt before; to node 0 others may have come already
        self._next = store.add(_ENTRIES, 0) + 1 if number else 1
        self._outgoing: queue.SimpleQueue[NodeLogEntry | None] = queue.SimpleQueue()
        self._lost: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._follow, name="accelerate_nb nodes", daemon=True)

    @classmethod
    def hosted(cls, listener: socket.socket) -> NodeLog:
        """The log of node 0, in a store that takes over a socket which listens at the endpoint."""
        from torch.distributed import TCPStore

        host, port = listener.getsockname()[:2]
        watch = socket.create_server((host, 0), family=listener.family, backlog=4096)
        timeout = timedelta(seconds=_STORE_TIMEOUT)
        store = TCPStore(host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())
        store.set(_PORT, str(watch.getsockname()[1]))
        store.set(_VERSION, str(VERSION))
        return cls(store, 0, PeerConnections(0, listener=watch))

    @classmethod
    def joined(cls, host: str, port: int) -> NodeLog:
        """The log of the node that listens there; raises `OSError` or `RuntimeError` where it does not, and `LaunchError` for another release."""
        from torch.distributed import TCPStore

        # what listens may be no store: it is to have an end
        store = TCPStore(host, port, None, False, timedelta(seconds=_STORE_TIMEOUT), wait_for_workers=False)
        if (version := store.get(_VERSION).decode(errors="replace")) != str(VERSION):
            raise LaunchError(
                f"The run at {host}:{port} was to be joined, and node 0 has another release of accelerate_nb: its messages have version "
                f"{version}, and {VERSION} is understood here. Install the same release on all nodes."
            )
        number = store.add(_NODES, 1)
        sock = socket.create_connection((host, int(store.get(_PORT))), _STORE_TIMEOUT)
        sock.settimeout(None)
        sock.sendall(_NUMBER.pack(number))
        return cls(store, number, PeerConnections(number, connection=sock))

    def start(self, on_entry: OnEntry, on_loss: OnLoss) -> None:
        """Begin to read."""
        self._on_entry, self._on_loss = on_entry, on_loss
        self._thread.start()
        self.peers.start(on_loss if self.number else lambda node, reason: self._lost.put((node, reason)))

    def post(self, message: Message, to: int | None = None, attempt: int = 0) -> None:
        """Add an entry, from any thread; it is lost where node 0 has gone, which shows by itself."""
        self._outgoing.put(NodeLogEntry(self.number, to, attempt, encode(message)))

    def close(self, linger: float = 0.0) -> None:
        """Post what is left, and leave; node 0 waits for so many seconds until the others, which need its store, have left."""
        self._outgoing.put(None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            # where node 0's machine was cut off, it waits there for long
            self._thread.join(_CLOSE_TIMEOUT)
        have_left = self.number != 0 or self.peers.wait_until_left(linger)
        self.peers.close()
        if not have_left:
            # they are to see that node 0 goes before its store does, of which torch would print a stack
            time.sleep(2 * _BETWEEN_LOOKS)
        self._store = None

    def _follow(self) -> None:
        store, is_open, beat = self._store, True, 0.0
        try:
            while is_open and self.peers.are_there:
                lost = self._drained(self._lost)
                for number in range(self._next, store.add(_ENTRIES, 0) + 1):
                    self._next = number + 1
                    self._take(store.get(f"{_ENTRIES}/{number}"))
                for node, reason in lost:
                    # after all that it has posted
                    self._on_loss(node, reason)
                if time.monotonic() - beat > 1.0:
                    beat = time.monotonic()
                    self.peers.send_sign()
                is_open = self._post_next(store)
        except RuntimeError:
            # the connections show why
            return

    def _post_next(self, store: Any) -> bool:
        """Post what there is, waited for a moment; whether there may be more."""
        timeout: float | None = _BETWEEN_LOOKS
        with suppress(queue.Empty):
            while True:
                entry = self._outgoing.get(timeout=timeout) if timeout else self._outgoing.get_nowait()
                if entry is None or not self.peers.are_there:
                    # a node that has lost node 0 is lost itself: it may not say that it left, which would end the run for all
                    return False
                store.set(f"{_ENTRIES}/{store.add(_ENTRIES, 1)}", encode(entry))
                timeout = None
        return True

    def _take(self, raw: bytes) -> None:
        """Take an entry; what can't be read is of a stranger."""
        with suppress(ProtocolError):
            entry = decode(raw)
            if isinstance(entry, NodeLogEntry) and entry.sender != self.number and entry.to in {None, self.number}:
                self._on_entry(entry, decode(entry.body))

    @staticmethod
    def _drained(source: queue.SimpleQueue[tuple[int, str]]) -> list[tuple[int, str]]:
        found = []
        with suppress(queue.Empty):
            while True:
                found.append(source.get_nowait())
        return found


class PeerConnections:
    """
    Connections between node 0 and each other node, over which nothing but signs of life goes: a process that ends closes its own.

    Node 0 has the `listener`, another node, with a number, its `connection`.
    """

    def __init__(
        self, number: int, *, listener: socket.socket | None = None, connection: socket.socket | None = None
    ) -> None:
        self._listener = listener
        # by number the connections, and when something came
        self._peers: dict[int, socket.socket] = {}
        self._heard: dict[socket.socket, float] = {}
        self._unknown: list[socket.socket] = []
        self._is_closed = False
        # this node's address, as the others reach it, and that of node 0
        self.address = self.host = ""
        self._thread = threading.Thread(target=self._watch, name="accelerate_nb peers", daemon=True)
        if connection is not None:
            self._add(0, connection)

    def start(self, on_loss: OnLoss) -> None:
        """Begin to watch."""
        self._on_loss = on_loss
        self._thread.start()

    @property
    def are_there(self) -> bool:
        """Whether the node that has the log is there."""
        return self._listener is not None or bool(self._peers)

    def send_sign(self) -> None:
        """Let the others know that this node is there."""
        for sock in list(self._peers.values()):
            with suppress(OSError):
                sock.send(b".", socket.MSG_DONTWAIT)

    def wait_until_left(self, timeout: float) -> bool:
        """Wait until all others have closed their connections; whether they have."""
        deadline = time.monotonic() + timeout
        while self._peers and time.monotonic() < deadline:
            time.sleep(0.05)
        return not self._peers

    def close(self) -> None:
        """Leave the others."""
        self._is_closed = True
        for sock in [*self._peers.values(), *self._unknown]:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        self._peers.clear()
        if self._listener is not None:
            self._listener.close()

    def _add(self, number: int, sock: socket.socket) -> None:
        self._peers[number], self._heard[sock] = sock, time.monotonic()
        # one that has gone already is found when it is read
        with suppress(OSError):
            probe_connection(sock)
            self.address, self.host = str(sock.getsockname()[0]), str(sock.getpeername()[0])

    def _watch(self) -> None:
        while not self._is_closed:
            own = [] if self._listener is None else [self._listener]
            try:
                ready = select.select([*own, *self._unknown, *list(self._peers.values())], (), (), 1.0)[0]
            except (OSError, ValueError):
                # closed meanwhile
                continue
            for sock in ready:
                self._read(sock)
            for number, sock in list(self._peers.items()):
                if time.monotonic() - self._heard[sock] > _SILENCE_LIMIT:
                    self._lose(
                        number, f"nothing came from it for {_SILENCE_LIMIT:g} s: its machine or its process was stopped"
                    )

    def _read(self, sock: socket.socket) -> None:
        if sock is self._listener:
            with suppress(OSError):
                self._unknown.append(sock.accept()[0])
            return
        number = next((number for number, known in list(self._peers.items()) if known is sock), None)
        if number is None and sock not in self._unknown:
            # closed meanwhile
            return
        try:
            data = sock.recv(4096 if number is not None else _NUMBER.size, socket.MSG_DONTWAIT)
            reason = "its connection has ended"
        except BlockingIOError:
            return
        except OSError as error:
            data, reason = b"", f"its connection has ended: {error.strerror or error}"
        if number is not None:
            self._heard[sock] = time.monotonic()
            if not data and not self._is_closed:
                self._lose(number, reason)
            return
        self._unknown.remove(sock)
        if len(data) == _NUMBER.size:
            self._add(_NUMBER.unpack(data)[0], sock)
        else:
            sock.close()

    def _lose(self, number: int, reason: str) -> None:
        if (sock := self._peers.pop(number, None)) is not None:
            sock.close()
            self._on_loss(number, reason)
