"""The agent of one node: it has the workers' pipes, files and exit codes, and reports what happens as messages."""

from __future__ import annotations

import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any

from accelerate_nb.events.channel import EventReader
from accelerate_nb.events.model import LogLine, TaskDone
from accelerate_nb.events.run_folder import RunRecorder
from accelerate_nb.launching.engines.base import Engine, Workers
from accelerate_nb.launching.node_agent.output_reader import OutputReader
from accelerate_nb.launching.node_agent.rank_queries import RankQueries
from accelerate_nb.transport.connection import Connection, local_workers
from accelerate_nb.transport.messages import (
    AgentLost,
    HoldAtBoundary,
    HoldRanks,
    HoldReply,
    KillGroup,
    LeaveGroup,
    Message,
    RankEvent,
    RankExited,
    RankHeld,
    RankOutput,
    ReleaseRanks,
    SignalRanks,
    StopAt,
    StopRankAt,
)
from accelerate_nb.transport.payload import Payload
from accelerate_nb.transport.worker_spec import WorkerSpec

_READ_AT_ONCE = 1 << 20


class NodeAgent:
    """
    Starts the workers of one node, reports on them with `report`, and carries out messages.

    It lives in the thread that calls `wait`, which may be the launching process's own; `wake`, `send`, `stacks` and `collectives`
    may be called from any other.

    >>> with NodeAgent(2, engine, record, report) as agent:
    ...     agent.start(specs, payload, store)
    ...     while not is_over():
    ...         agent.wait(0.02)
    """

    def __init__(self, size: int, engine: Engine, record: RunRecorder, report: Callable[[Message], None]) -> None:
        self._size, self._engine, self._record, self._report = size, engine, record, report
        self._numbers: Counter[int] = Counter()
        self._connections: list[Connection] = []
        self._readers: dict[int, EventReader] = {}
        # the ranks that have sent something
        self._connected: set[int] = set()
        self._workers: Workers | None = None
        # the ranks whose processes have ended
        self._gone: set[int] = set()
        self._is_lost = False
        self._queries = RankQueries(self._connected)
        self._output = OutputReader(self._on_output)
        self._urgent = selectors.DefaultSelector()
        self._waker_far, self._waker = socket.socketpair()
        for end in (self._waker_far, self._waker):
            end.setblocking(False)
        self._urgent.register(self._waker_far, selectors.EVENT_READ, lambda: self._waker_far.recv(4096))

    def __enter__(self) -> NodeAgent:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._queries.closing():
            # nothing is sent to anybody any more
            self._gone.update(range(self._size))
            if self._workers is not None:
                self._workers.kill()
                self._workers.close()
            for connection in self._connections:
                connection.cut()
        self._output.close()
        self._urgent.close()
        self._waker_far.close()
        self._waker.close()

    # -------------------------------------------------------------------------------------------------------- steps

    def open(self) -> None:
        """Make the connections with the ranks, of which none has begun."""
        self._connections = [Connection.open() for _ in range(self._size)]
        self._queries.connections = self._connections
        for rank, connection in enumerate(self._connections):
            self._readers[rank] = EventReader()
            self._urgent.register(connection.events, selectors.EVENT_READ, partial(self._on_events, rank))
            self._output.listen(rank, connection)

    def start(self, specs: Sequence[Sequence[WorkerSpec]], payload: Payload, store: int) -> None:
        """Start the processes of these specs; `store` is the listening socket of the rendezvous, for rank 0."""
        self._workers = self._engine.start(local_workers(specs, self._connections, payload, store))
        for connection in self._connections:
            connection.close()
        for descriptor in self._workers.exit_descriptors():
            self._urgent.register(descriptor, selectors.EVENT_READ, self._on_exits)

    def wait(self, timeout: float) -> None:
        """Report what happens, for at most so many seconds."""
        for key, _ in self._urgent.select(timeout):
            key.data()
        if self._workers is not None and not self._workers.exit_descriptors():
            self._on_exits()

    def doze(self, timeout: float) -> None:
        """The same, and be woken by whatever is written."""
        # Linux's and macOS's selectors can be waited for themselves
        logs = self._output.fileno()
        if logs not in self._urgent.get_map():
            self._urgent.register(logs, selectors.EVENT_READ, partial(self._on_doze_ended, logs))
        self.wait(timeout)

    def read_output(self) -> None:
        """Report what ranks have written."""
        self._output.read()

    def drain(self) -> None:
        """Report what is left; the processes have ended."""
        self._output.drain()
        for rank in range(self._size):
            self._on_events(rank)

    def carry_out(self, message: Message) -> None:
        """Carry out a message of the worker group."""
        match message:
            case SignalRanks(number, ranks) if self._workers is not None:
                self._workers.signal(number, ranks)
            case KillGroup() if self._workers is not None:
                self._workers.kill()
            case HoldRanks(ranks):
                for rank in ranks:
                    self._queries.query(rank, HoldAtBoundary(), partial(self._on_held, rank), self._urgent)
            case StopRankAt(rank, point):
                self.send(rank, StopAt(point))
            case ReleaseRanks(ranks):
                for rank in ranks:
                    self.send(rank, LeaveGroup())

    # -------------------------------------------------------------------------------------------------- any thread

    def wake(self) -> None:
        """End a `wait`."""
        # where it is full, or its reader has gone, nobody needs to be woken
        with suppress(OSError):
            self._waker.send(b"\n")

    def send(self, rank: int, message: Message, descriptors: Sequence[int] = ()) -> bool:
        """Send a message to a worker's inbox; whether it could be delivered."""
        return bool(self._connections) and self._queries.send(rank, message, descriptors)

    def stacks(self, over: Callable[[], Collection[int]]) -> dict[int, str]:
        """The stack dump of every rank that is not `over`; empty where a rank sends none."""
        if self._workers is None:
            return {}
        return self._queries.stacks(lambda: {*self._gone, *over()}, self._workers)

    def collectives(self, ranks: Collection[int]) -> dict[int, Any]:
        """The collectives that are under way in each rank, as far as it replies in time."""
        return self._queries.collectives(ranks)

    # -------------------------------------------------------------------------------------------------------- files

    @property
    def wrote_last(self) -> float:
        """The time at which something was written last, on the monotonic clock."""
        return self._output.wrote_last

    @property
    def sees_exits(self) -> bool:
        """Whether the end of a process wakes a `wait`."""
        return self._workers is not None and bool(self._workers.exit_descriptors())

    def exit_codes(self) -> dict[int, int]:
        """The exit code of every rank whose process has ended."""
        return {} if self._workers is None else dict(self._workers.exit_codes())

    def outcome_file(self, rank: int) -> int:
        """The file in which a rank leaves its outcome."""
        return self._connections[rank].outcome

    def stacks_file(self, rank: int) -> int:
        """The file in which a rank writes its stacks, and where it was when it crashed."""
        return self._connections[rank].stacks

    # ------------------------------------------------------------------------------------------------------ receiving

    def _number(self, rank: int) -> int:
        self._numbers[rank] += 1
        return self._numbers[rank] - 1

    def _on_output(self, rank: int, raw: bytes, lines: tuple[LogLine, ...]) -> None:
        if raw:
            self._record.output(rank, raw)
        self._report(RankOutput(rank, self._number(rank), lines))

    def _on_doze_ended(self, logs: int) -> None:
        self._urgent.unregister(logs)
        self._output.wrote_last = time.monotonic()

    def _on_held(self, rank: int, reply: Message | None) -> None:
        position = reply.position if isinstance(reply, HoldReply) else None
        self._report(RankHeld(rank, self._number(rank), position))

    def _on_events(self, rank: int) -> None:
        sock = self._connections[rank].events
        try:
            data = sock.recv(_READ_AT_ONCE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            if sock.fileno() in self._urgent.get_map():
                self._urgent.unregister(sock)
            return
        self._connected.add(rank)
        for event in self._readers[rank].feed(data):
            if isinstance(event, TaskDone):
                # after all that the rank wrote before
                self._output.read_all_of(rank)
            self._report(RankEvent(rank, self._number(rank), event))

    def _on_exits(self) -> None:
        assert self._workers is not None
        self._workers.news()
        for rank, code in self.exit_codes().items():
            if rank not in self._gone:
                self._gone.add(rank)
                # what it sent last may still be on its way
                self._on_events(rank)
                self._report(RankExited(rank, self._number(rank), code, time.time()))
        if not self._is_lost and (reason := self._workers.lost()) is not None:
            self._is_lost = True
            self._report(AgentLost(reason))
        exit_descriptors = self._workers.exit_descriptors()
        for descriptor in [key.fd for key in self._urgent.get_map().values() if key.data == self._on_exits]:
            # a descriptor that has reported an end would report it for ever
            if descriptor not in exit_descriptors:
                self._urgent.unregister(descriptor)
