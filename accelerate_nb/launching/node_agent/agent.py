"""The agent of one node: it has the workers' pipes, files and exit codes, and reports what happens as messages."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from accelerate_nb.errors import LaunchError
from accelerate_nb.events.event_codec import EventReader
from accelerate_nb.events.event_types import Failure, LogLine, StateChange, Stream, TaskDone
from accelerate_nb.events.line_reader import LineAssembler, OutputLine
from accelerate_nb.failures.hang_report import StackSnapshot
from accelerate_nb.failures.process_limits import limit_reached
from accelerate_nb.failures.stack_dumps import SIGNAL, crash_dump, dumps_since, lengths, process_state
from accelerate_nb.launching.engines.children import Engine, Workers
from accelerate_nb.launching.node_agent.node_logs import Connection, OutputPart, RankLog, local_workers, open_logs
from accelerate_nb.transport import messages
from accelerate_nb.transport.channel import FrameReader
from accelerate_nb.transport.memory_file import memory_file

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

_READ_AT_ONCE = 1 << 20
# Pipes are emptied at most this often: a reader that wakes for every line costs the workers more than the lines do.
BETWEEN_READS = 0.02
# Where nothing is due, it is checked this often what else may be.
LONGEST_WAIT = 1.0
# Where nothing was written for so long, the pipes are watched instead of read.
_QUIET_AFTER = 1.0
# How long ranks get to reply with their positions, and how often it is checked whether they have.
_REPLY_TIMEOUT, _BETWEEN_REPLIES = 1.0, 0.01
# Where output is held back, it is checked this often whether its turn has come.
_BETWEEN_TURNS = 0.25

# Takes a report of an agent, and its descriptors, which are the taker's to close.
Report: TypeAlias = Callable[[messages.Message, Sequence[int]], None]


class AgentLoop:
    """Calls a handler for each descriptor that becomes readable, in the thread that calls `wait`; `wake` may be called from any."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._waker_far, self._waker = socket.socketpair()
        for end in (self._waker_far, self._waker):
            end.setblocking(False)
        self.register(self._waker_far, lambda: self._waker_far.recv(4096))

    def close(self) -> None:
        """Watch nothing any more."""
        self._selector.close()
        self._waker_far.close()
        self._waker.close()

    def register(self, readable: FileDescriptorLike, handler: Callable[[], object]) -> None:
        """Call `handler` whenever a descriptor is readable, unless it is watched already."""
        if readable not in self._selector.get_map():
            self._selector.register(readable, selectors.EVENT_READ, handler)

    def unregister(self, readable: FileDescriptorLike) -> None:
        """Watch a descriptor no longer, where it is watched."""
        with suppress(KeyError, ValueError):
            self._selector.unregister(readable)

    def wait(self, timeout: float | None) -> None:
        """Call the handlers of what is readable, or becomes so within so many seconds."""
        for key, _ in self._selector.select(timeout):
            # another's handler may have unregistered it
            if self._selector.get_map().get(key.fd) is key:
                key.data()

    def wake(self) -> None:
        """End a `wait`."""
        # where it is full, or its reader has gone, nobody needs to be woken
        with suppress(OSError):
            self._waker.send(b"\n")


class Agent:
    """The agent of one node as a worker group's runner sees it: in this process, or at the other end of a channel."""

    # Reports come in `tick`, in its loop's handlers and in `drain`; `carry_out` with a `ToRank` and `snapshot` may be called from any thread.

    # of its workers
    ranks: tuple[int, ...] = ()
    # whether its workers can inherit a socket of this process
    takes_sockets = False
    # whether it brings the outcomes of its workers; else values and exceptions stay on their node
    has_outcomes = True

    def start(self, request: messages.StartWorkers, descriptors: Sequence[int]) -> None:
        """Start workers, or raise `LaunchError`; the descriptors stay the caller's."""

    def tick(self, now: float, timeout: float) -> float:
        """Report what is due, on the monotonic clock; returns the seconds for which the loop may wait, at most `timeout`."""
        return timeout

    def carry_out(self, message: messages.Message, descriptors: Sequence[int] = ()) -> None:
        """Carry out a message of the worker group; the descriptors stay the caller's."""

    def snapshot(self, ranks: Sequence[int]) -> StackSnapshot:
        """The stack dump of each of these ranks that has not ended, and its collectives, as far as it replies in time."""
        return StackSnapshot({}, {})

    def drain(self) -> None:
        """Report what is left; the processes have ended."""

    def close(self) -> None:
        """End whatever still runs; nothing is sent to anybody any more."""


class NodeAgent(Agent):
    """Starts the workers of this node, reports on them with `report`, and carries out messages; it lives in its loop's thread."""

    takes_sockets = True

    def __init__(self, engine: Engine, loop: AgentLoop, report: Report) -> None:
        self._engine, self._loop, self._report = engine, loop, report
        self._numbers: Counter[int] = Counter()
        self._connections: dict[int, Connection] = {}
        self._readers: dict[int, EventReader] = {}
        # the files of the replies to tasks that are under way, by rank and task
        self._replies: dict[tuple[int, int], int] = {}
        # the ranks that have sent something, and those whose processes have ended
        self._connected: set[int] = set()
        self._gone: set[int] = set()
        # those that still ran when they were killed from here
        self._killed: set[int] = set()
        # the processes of the ranks that have begun
        self.pids: dict[int, int] = {}
        self._workers: Workers | None = None
        self._exit_descriptors: set[int] = set()
        self._is_lost = False
        # while ranks are asked where they are, and from the end on
        self._query_lock, self._is_closed = threading.Lock(), False
        # what ranks write to, and where the whole logs stay on this node
        self._pipes = selectors.DefaultSelector()
        self._assemblers: dict[tuple[int, Stream], LineAssembler] = {}
        self._wrote_last = time.monotonic()
        self._logs: dict[int, RankLog] = {}
        self._logs_lock = -1
        self._read_next = 0.0

    def start(self, request: messages.StartWorkers, descriptors: Sequence[int]) -> None:
        self.ranks = request.ranks
        if request.log_folder:
            self._logs, self._logs_lock = open_logs(request.log_folder, self.ranks, os.environ)
        try:
            for rank in self.ranks:
                self._connections[rank] = connection = Connection.open()
                self._readers[rank] = EventReader()
                self._loop.register(connection.events, partial(self._on_events, rank))
                outputs: list[tuple[Stream, int]] = [("stdout", connection.stdout), ("stderr", connection.stderr)]
                for stream, descriptor in outputs:
                    self._assemblers[rank, stream] = LineAssembler()
                    self._pipes.register(descriptor, selectors.EVENT_READ, (rank, stream, descriptor))
            self._workers = self._engine(local_workers(request, self._connections, descriptors))
        except OSError as error:
            if reached := limit_reached(error, len(self.ranks)):
                raise LaunchError(f"num_processes={len(self.ranks)} was requested, but {reached}") from None
            raise
        finally:
            for connection in self._connections.values():
                connection.close()
        self._exit_descriptors = set(self._workers.exit_descriptors())
        for descriptor in self._exit_descriptors:
            self._loop.register(descriptor, self._on_exits)

    def tick(self, now: float, timeout: float) -> float:
        if now >= self._read_next:
            for key, _ in self._pipes.select(0):
                self._read_pipe(*key.data)
            self._read_next = now + BETWEEN_READS
            for rank, log in self._logs.items():
                self._report_output(rank, log.due())
        if not self._exit_descriptors and self._workers is not None:
            self._on_exits()
        if now - self._wrote_last <= _QUIET_AFTER or not self._exit_descriptors:
            return min(timeout, BETWEEN_READS)
        # Linux's and macOS's selectors can be waited for themselves
        self._loop.register(self._pipes.fileno(), self._on_quiet_ended)
        return min(timeout, _BETWEEN_TURNS) if any(log.held for log in self._logs.values()) else timeout

    def drain(self) -> None:
        if self._workers is not None:
            self._on_exits()
        # one that was not theirs may hold a pipe open
        for key in list(self._pipes.get_map().values()):
            while self._read_pipe(*key.data):
                pass
        for (rank, stream), assembler in self._assemblers.items():
            self._take_output(rank, stream, *assembler.close())
        for rank in self.ranks:
            self._on_events(rank)
            self._report_rest(rank)
            if rank not in self._gone:
                # its end was not seen, and it may have left its outcome before
                self._report_outcome(rank)

    def close(self) -> None:
        with self._query_lock:
            # nothing is sent to anybody any more
            self._is_closed = True
            self._gone.update(self.ranks)
            if self._workers is not None:
                self._workers.kill()
                self._workers.close()
            for connection in self._connections.values():
                self._loop.unregister(connection.events)
                connection.cut()
        for descriptor in self._exit_descriptors:
            self._loop.unregister(descriptor)
        self._loop.unregister(self._pipes.fileno())
        self._pipes.close()
        for reply in self._replies.values():
            os.close(reply)
        for log in self._logs.values():
            log.close()
        if self._logs_lock >= 0:
            os.close(self._logs_lock)

    def carry_out(self, message: messages.Message, descriptors: Sequence[int] = ()) -> None:
        match message:
            case messages.ToRank(rank, messages.BeginTask() as task):
                self._replies[rank, task.number] = reply = memory_file("accelerate_nb_reply")
                self._send(rank, task, (*descriptors, reply))
            case messages.ToRank(rank, content):
                self._send(rank, content, descriptors)
            case messages.SignalRanks() | messages.KillGroup() if self._workers is not None:
                self._signal(message, self._workers)
            case messages.ReleaseRanks(ranks):
                for rank in ranks:
                    self._send(rank, messages.LeaveGroup())

    # -------------------------------------------------------------------------------------------------- any thread

    def snapshot(self, ranks: Sequence[int]) -> StackSnapshot:
        """The stack dump of each of these ranks that runs, or else the state of its process, and its collectives, as far as it replies in time."""
        with self._query_lock:
            if self._workers is None or self._is_closed:
                return StackSnapshot({}, {})
            running = [rank for rank in ranks if rank not in self._gone]
            # a process that has not sent anything yet is not ready for the signal, and would be ended by it
            ready = [rank for rank in running if rank in self._connected]
            before = {rank: lengths([self._connections[rank].stacks])[0] for rank in ready}
            for rank in ready:
                self._send(rank, messages.QueryPosition())
            dumps: dict[int, str] = {}
            collectives: dict[int, list[Mapping[str, Any]]] = {}
            deadline = time.monotonic() + _REPLY_TIMEOUT
            while len(dumps) < len(ready) and time.monotonic() < deadline:
                time.sleep(_BETWEEN_REPLIES)
                for rank in ready:
                    if rank not in dumps and (reply := self._position(rank, before[rank])) is not None:
                        dumps[rank], collectives[rank] = reply.stack, list(reply.entries)
            # the main thread keeps the others from running, in compiled code: its calls stand still, where a signal that
            # meets a call being made ends the process in a fault of memory, as it would one that was stopped and goes on
            if late := [rank for rank in ready if rank not in dumps and not process_state(self.pids.get(rank))]:
                files = [self._connections[rank].stacks for rank in late]
                signaled = lengths(files)
                self._workers.signal(SIGNAL, late)
                dumps |= zip(late, dumps_since(files, signaled), strict=True)
        stacks = {rank: dumps.get(rank) or process_state(self.pids.get(rank)) for rank in running}
        return StackSnapshot(stacks, collectives)

    def _position(self, rank: int, start: int) -> messages.PositionReply | None:
        """The reply that a rank wrote into its file of stacks after so many bytes, once it is whole."""
        reader = FrameReader(after_greeting=True)
        reader.feed(os.pread(self._connections[rank].stacks, 1 << 20, start))
        message, _ = reader.next() or (None, 0)
        return message if isinstance(message, messages.PositionReply) else None

    def _send(self, rank: int, message: messages.Message, descriptors: Sequence[int] = ()) -> None:
        if rank in self._connections:
            self._connections[rank].inbox.try_send(message, descriptors)

    def _number(self, rank: int) -> int:
        self._numbers[rank] += 1
        return self._numbers[rank] - 1

    def _read_pipe(self, rank: int, stream: Stream, descriptor: int) -> bool:
        try:
            data = os.read(descriptor, _READ_AT_ONCE)
        except BlockingIOError:
            return False
        if not data:
            self._pipes.unregister(descriptor)
            return False
        self._wrote_last = time.monotonic()
        self._take_output(rank, stream, *self._assemblers[rank, stream].feed(data))
        return True

    def _take_output(self, rank: int, stream: Stream, raw: bytes, lines: Sequence[OutputLine]) -> None:
        if raw or lines:
            now, log = time.time(), self._logs.get(rank)
            read = tuple(LogLine(rank, stream, line.text, now, line.open, line.meaning) for line in lines)
            self._report_output(rank, OutputPart(raw, read) if log is None else log.take(raw, read))

    def _report_output(self, rank: int, part: OutputPart | None) -> None:
        if part is not None:
            path = str(self._logs[rank].path) if part.left_out else ""
            self._report(messages.RankOutput(rank, self._number(rank), *part, path), ())

    def _report_rest(self, rank: int) -> None:
        """Report all of a rank's output that was held back."""
        if rank in self._logs:
            self._report_output(rank, self._logs[rank].rest())

    def _on_quiet_ended(self) -> None:
        self._loop.unregister(self._pipes.fileno())
        self._wrote_last = time.monotonic()

    def _on_events(self, rank: int) -> None:
        sock = self._connections[rank].events
        try:
            data = sock.recv(_READ_AT_ONCE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.unregister(sock)
            return
        self._connected.add(rank)
        for event in self._readers[rank].feed(data):
            if isinstance(event, TaskDone):
                # after all that the rank wrote before, which its pipes hold; a line that has not ended ends here
                for key in [key for key in self._pipes.get_map().values() if key.data[0] == rank]:
                    self._read_pipe(*key.data)
                    stream: Stream = key.data[1]
                    self._take_output(rank, stream, *self._assemblers[rank, stream].close())
                self._report_rest(rank)
                if (reply := self._replies.pop((rank, event.number), None)) is not None:
                    self._report(messages.RankTaskReply(rank, self._number(rank), event.number), (reply,))
            if isinstance(event, (StateChange, Failure)):
                self._report_rest(rank)
            if isinstance(event, StateChange) and event.detail.isdecimal():
                self.pids = {**self.pids, rank: int(event.detail)}
            self._report(messages.RankEvent(rank, self._number(rank), event), ())

    def _on_exits(self) -> None:
        assert self._workers is not None
        self._workers.news()
        for rank, code in dict(self._workers.exit_codes()).items():
            if rank not in self._gone:
                self._gone.add(rank)
                # what it sent last may still be on its way
                self._on_events(rank)
                self._report_outcome(rank)
                stacks = crash_dump(self._connections[rank].stacks)
                killed = rank in self._killed and code == -signal.SIGKILL
                self._report(messages.RankExited(rank, self._number(rank), code, time.time(), stacks, killed), ())
        if not self._is_lost and (reason := self._workers.lost()) is not None:
            self._is_lost = True
            self._report(messages.AgentLost(self.ranks, reason, time.time()), ())
        # a descriptor that has reported an end would report it for ever
        for descriptor in self._exit_descriptors - set(self._workers.exit_descriptors()):
            self._loop.unregister(descriptor)
            self._exit_descriptors.discard(descriptor)

    def _signal(self, order: messages.SignalRanks | messages.KillGroup, workers: Workers) -> None:
        """Signal ranks; of those that are killed now, the ones that have ended by then were not killed from here."""
        ranks = order.ranks if isinstance(order, messages.SignalRanks) else self.ranks
        if isinstance(order, messages.KillGroup) or order.number == signal.SIGKILL:
            self._on_exits()
            self._killed.update(rank for rank in ranks if rank not in self._gone)
        if isinstance(order, messages.KillGroup):
            workers.kill()
        else:
            workers.signal(order.number, ranks)

    def _report_outcome(self, rank: int) -> None:
        self._report(messages.RankOutcome(rank, self._number(rank)), (os.dup(self._connections[rank].outcome),))
