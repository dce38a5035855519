"""The loop of a session's worker, one task after the other until the session is closed; and a cell that runs outside of one."""

import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any, NamedTuple

from msgspec import structs

from accelerate_nb.errors import PayloadError
from accelerate_nb.events.event_types import TaskDone
from accelerate_nb.failures.exception_copy import linked_exceptions
from accelerate_nb.rank import background_tasks
from accelerate_nb.rank.event_sink import emit, outlet
from accelerate_nb.rank.step_hold import current_step_hold
from accelerate_nb.rank.step_profiler import current_step_profiler
from accelerate_nb.sources.cells import CellSources, kept_numbers, sources_of
from accelerate_nb.sources.run_source import SourcePart
from accelerate_nb.transport import session_tasks
from accelerate_nb.transport.exception_chain import portable
from accelerate_nb.transport.memory_file import Bytes, map_entries, write_entries
from accelerate_nb.transport.messages import BeginTask, CloseSession, InterruptTask
from accelerate_nb.transport.outcome import failure_of, why_left_out
from accelerate_nb.transport.payload import is_no_failure
from accelerate_nb.transport.serializer import dump_homeward, load, unpicklable_part
from accelerate_nb.worker import stdio
from accelerate_nb.worker.control_channel import ControlChannel
from accelerate_nb.worker.process_group_keys import begin_generation

# How long an interrupt may take to be seen, before it is taken that the rank waits for others in compiled code.
_TIMEOUT = 0.4
# Where torch waits for other ranks: who fails there has left the groups in a state that nobody knows.
_COLLECTIVE = (os.path.join("torch", "distributed"), os.path.join("nn", "parallel", "distributed.py"))

# The advice where a group is used that a rebuild has ended.
_GONE = (
    "The process groups were rebuilt after an earlier failure, and your own groups (new_group, device meshes) are gone. "
    "Make them again."
)


def session() -> None:
    """Be a session's worker: report that it is ready, then do the kernel's tasks, in this thread, one after the other."""
    channel, sender = ControlChannel.current, outlet()
    assert channel is not None
    assert sender is not None
    TaskLoop(sender.rank, channel).work()


class _PendingTask(NamedTuple):
    """A task that has come, and the descriptors of its request and its reply."""

    message: BeginTask
    request: int
    reply: int


class TaskLoop:
    """One worker's tasks, done in a shell of its own; those that come while one is done wait."""

    def __init__(self, rank: int, channel: ControlChannel) -> None:
        from accelerate_nb.worker.session.shell import new_shell

        self._rank = rank
        self._due: queue.SimpleQueue[_PendingTask | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._number: int | None = None
        self._is_interrupted = False
        self._early: set[int] = set()
        self._can_be_stopped = False
        self._done = threading.Event()
        # held while connections are cut: those of the next task are not meant
        self._freeing = threading.Lock()
        self._known: frozenset[str] = frozenset()
        # groups of the person's own that went when groups were rebuilt
        self._gone = 0
        sys.modules["__main__"] = self._main = ModuleType("__main__")
        self._shell = new_shell(self._main)
        exec(compile(session_tasks.NAMESPACE, "<accelerate_nb>", "exec"), vars(self._main))
        channel.on(BeginTask, self.on_task)
        channel.on(InterruptTask, self.on_interrupt)
        # tasks that have come are done still
        channel.on(CloseSession, lambda *_: self._due.put(None))
        emit(TaskDone(rank, 0))

    # ---------------------------------------------------------------------------------------- in the inbox's thread

    def on_task(self, message: BeginTask, descriptors: Sequence[int]) -> None:
        # a profile that is requested right after it is meant for this task
        current_step_profiler().begin_function()
        self._due.put(_PendingTask(message, *descriptors))

    def on_interrupt(self, message: InterruptTask, _: Sequence[int]) -> None:
        """Interrupt a task, if it is the one that is being done."""
        with self._lock:
            if self._number != message.number:
                # it comes too early, and is seen when the task begins; or too late
                self._early.add(message.number)
                return
            self._is_interrupted = True
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        threading.Thread(
            target=self._free, args=(message.number, message.others), name="accelerate_nb freeing", daemon=True
        ).start()

    def _free(self, number: int, others: Sequence[int]) -> None:
        """Free the main thread, where it does not see the interrupt because it waits for others."""
        port = int(os.environ["MASTER_PORT"])
        if self._done.wait(_TIMEOUT):
            return
        with self._freeing:
            if self._number != number:
                return
            cut_connections(others, store_port=port)
            abort_devices()
        if self._done.wait(_TIMEOUT):
            return
        with self._freeing:
            if self._number == number:
                cut_from_store(port)

    # ------------------------------------------------------------------------------------------ in the main thread

    def work(self) -> None:
        while (due := self._due.get()) is not None:
            signal.signal(signal.SIGINT, self._on_sigint)
            self._do(due)

    def _on_sigint(self, number: int, frame: FrameType | None) -> None:
        """SIGINT: from our own thread it is for the task, and comes too late where that is over; from the kernel it is for all."""
        if not self._is_interrupted or self._can_be_stopped:
            raise KeyboardInterrupt

    def _do(self, due: _PendingTask) -> None:
        began = time.monotonic()
        self._done.clear()
        current_step_hold().restart()
        current_step_profiler().begin_function()
        with self._freeing, self._lock:
            self._number, self._is_interrupted = due.message.number, due.message.number in self._early
        try:
            self._can_be_stopped = True
            reply = self._reply(due) if not self._is_interrupted else self._failed(KeyboardInterrupt())
            self._can_be_stopped = False
        except KeyboardInterrupt as error:
            self._can_be_stopped = False
            if not self._is_interrupted:
                raise
            reply = self._failed(error)
        current_step_profiler().end_function()
        if self._is_interrupted and reply.failure is not None:
            reply = replace(reply, failure=structs.replace(reply.failure, ended_by_us=True))
        with self._lock:
            self._number = None
            # tasks that have come since then wait still
            self._early = {number for number in self._early if number > due.message.number}
        self._done.set()
        seconds = time.monotonic() - began
        self._leave(due, replace(reply, seconds=seconds, groups=_collectives(), names=_names(self._shell)))

    def _reply(self, due: _PendingTask) -> session_tasks.TaskReply:
        try:
            if due.message.renewal is not None:
                cut_connections(due.message.others, store_port=int(os.environ["MASTER_PORT"]))
                from accelerate_nb.runtime.world.registry import rebuild_groups

                self._gone += rebuild_groups(due.message.renewal)
                begin_generation(due.message.renewal)
            request: session_tasks.TaskRequest = load(map_entries(due.request))
            self._known = request.known
            # the notebook's lines, and its functions and classes under their names, where the worker has none of its own
            CellSources(request.lines, request.numbers).install()
            kept_numbers(self._shell).update(request.numbers)
            vars(self._main).update(
                {name: value for name, value in request.names.items() if name not in vars(self._main)}
            )
            match request.task:
                case session_tasks.RunCell() as cell:
                    return self._run(cell)
                case session_tasks.PushNames(values):
                    vars(self._main).update(values)
                case session_tasks.PullNames(names):
                    return session_tasks.TaskReply(0.0, value=self._pulled(names))
                case session_tasks.CallFunction() as invoke:
                    value = invoke.function(*invoke.args, **invoke.kwargs)
                    background_tasks.finish()
                    return session_tasks.TaskReply(0.0, value={session_tasks.RETURNED: value})
                case None:
                    pass
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - reported in the notebook; the worker goes on
            return session_tasks.TaskReply(0.0) if is_no_failure(error) else self._failed(error)
        return session_tasks.TaskReply(0.0)

    def _run(self, cell: session_tasks.RunCell) -> session_tasks.TaskReply:
        bundle, metadata, error = self._shell.run(cell)
        if error is None or is_no_failure(error):
            return session_tasks.TaskReply(0.0, result=bundle, metadata=metadata)
        return self._failed(error)

    def _pulled(self, names: Sequence[str]) -> dict[str, Any]:
        main_names = vars(self._main)
        for name in names:
            if name not in main_names:
                raise NameError(
                    f"{name!r} was requested, but rank {self._rank} has no such variable. "
                    f"There are: {', '.join(_names(self._shell))}."
                )
        return {name: main_names[name] for name in names}

    def _failed(self, error: BaseException) -> session_tasks.TaskReply:
        # the code has ended: an interrupt of it comes too late
        self._can_be_stopped = False
        sources = sources_of(kept_numbers(self._shell))
        if isinstance(error, SyntaxError) and error.filename is not None and error.filename in sources.numbers:
            # it holds a file name of its own
            error.filename = sources.name(error.filename)
        frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
        failure = failure_of(error.with_traceback(below(error.__traceback__, sources)), self._rank, sources)
        for link in linked_exceptions(error):
            # a cell that filled a GPU holds nothing of it
            traceback.clear_frames(link.__traceback__)
        in_collective = any(part in frame for frame in frames for part in _COLLECTIVE)
        if in_collective and self._gone and not failure.advice:
            failure = structs.replace(failure, advice=_GONE)
        return session_tasks.TaskReply(
            0.0, failure=failure, error=portable(error, self._known), in_collective=in_collective
        )

    def _leave(self, due: _PendingTask, reply: session_tasks.TaskReply) -> None:
        """Leave the reply in the kernel's file, and report it after all that was written."""
        try:
            write_entries(due.reply, self._packed(reply))
        finally:
            os.close(due.reply)
            os.close(due.request)
        stdio.flush()
        emit(TaskDone(self._rank, due.message.number))

    def _packed(self, reply: session_tasks.TaskReply) -> list[Bytes]:
        try:
            return dump_homeward(reply, self._known)
        except Exception as error:  # noqa: BLE001 - a pickler calls anybody's code, which may raise anything
            if reply.value is not None and session_tasks.RETURNED in reply.value:
                left_out = why_left_out(reply.value[session_tasks.RETURNED], error, self._known)
                return dump_homeward(
                    replace(reply, value={session_tasks.RETURNED: None}, left_out=left_out), self._known
                )
            part = unpicklable_part(reply.value, "variables", partial(dump_homeward, known=self._known))
            text = f"{part}, which can't be sent to the notebook ({type(error).__name__}: {error}). Pull what it is made from."
            failed = self._failed(PayloadError(text))
            failed_reply = replace(failed, seconds=reply.seconds, groups=reply.groups, names=reply.names)
            return dump_homeward(failed_reply, self._known)


def _collectives() -> dict[str, int]:
    if "torch.distributed" not in sys.modules:
        return {}
    from accelerate_nb.runtime.world.registry import collectives

    return collectives()


def _names(shell: Any) -> tuple[str, ...]:
    return tuple(sorted(name for name in list(shell.user_ns) if name[:1] != "_" and name not in shell.user_ns_hidden))


def below(trace: TracebackType | None, sources: CellSources) -> TracebackType | None:
    """A traceback from the first line of a cell on: the frames above it are of no use to a reader."""
    first = trace
    while first is not None and first.tb_frame.f_code.co_filename not in sources.lines:
        first = first.tb_next
    return first or trace


@dataclass(frozen=True)
class DetachedCell:
    """Runs a cell on a rank with a session's names and the notebook's `values`; its last value is shown."""

    cell: session_tasks.RunCell
    values: Mapping[str, Any]
    __name__: str

    def source_parts(self) -> tuple[SourcePart, ...]:
        return (SourcePart("function", self.__name__, self.cell.source.lstrip("\n")),)

    def __call__(self) -> None:
        from accelerate_nb.worker.session.shell import new_shell

        main = sys.modules["__main__"]
        if not isinstance(main, ModuleType):
            main = sys.modules["__main__"] = ModuleType("__main__")
        shell = new_shell(main)
        exec(compile(session_tasks.NAMESPACE, "<accelerate_nb>", "exec"), vars(main))
        vars(main).update(self.values)
        bundle, metadata, error = shell.run(self.cell)
        if error is not None and not is_no_failure(error):
            raise error.with_traceback(below(error.__traceback__, sources_of(kept_numbers(shell))))
        background_tasks.finish()
        if bundle is not None and vars(main)["rank"] == 0:
            stdio.show(bundle, metadata)


# --------------------------------------------------------------------------------- freeing a rank that waits for others


def cut_connections(others: Collection[int], *, store_port: int) -> None:
    """Cut this process's TCP connections to the processes `others`, but for those to the store of the rendezvous."""
    # A collective of gloo that waits raises on both sides, at once: nothing else ends it (torch's `abort` does so for
    # NCCL alone). Where /proc does not show whose a connection is, all within this machine are cut. Of those to ranks
    # on other machines, each side cuts the ones that it has accepted: one of two ranks has
    # (gloo/transport/tcp/pair.cc).
    has_ranks_elsewhere = os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE")
    theirs, listening = _inodes(others), _listening_ports() if has_ranks_elsewhere else set()
    for connection in _connections():
        with connection, suppress(OSError):
            near, far = connection.getsockname(), connection.getpeername()
            if store_port in (near[1], far[1]):
                continue
            is_local = near[0] == far[0] and (theirs is None or _inode_at(far[1], near[1]) in theirs)
            if is_local or near[1] in listening:
                connection.shutdown(socket.SHUT_RDWR)


def cut_from_store(port: int) -> None:
    """Cut this process off from the store of the rendezvous: a wait for a key there raises."""
    for connection in _connections():
        with connection, suppress(OSError):
            if connection.getpeername()[1] == port:
                connection.shutdown(socket.SHUT_RDWR)


def abort_devices() -> None:
    """Have collectives that wait on devices end with an error."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:
        return
    for group, (backend, _) in list(c10d._world.pg_map.items()):
        if "nccl" in str(backend):
            with suppress(RuntimeError):
                group.abort()


def _connections() -> Iterator[socket.socket]:
    for name in os.listdir("/dev/fd"):
        try:
            copy = os.dup(int(name))
        except OSError:
            # closed meanwhile
            continue
        try:
            sock = socket.socket(fileno=copy)
        except OSError:
            # something else than a socket
            os.close(copy)
            continue
        if sock.type == socket.SOCK_STREAM and sock.family in (socket.AF_INET, socket.AF_INET6):
            yield sock
        else:
            sock.close()


def _listening_ports() -> set[int]:
    ports = set()
    for sock in _connections():
        with sock, suppress(OSError):
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                ports.add(sock.getsockname()[1])
    return ports


def _inodes(pids: Collection[int]) -> set[str] | None:
    """The sockets of processes, as /proc names them."""
    if sys.platform != "linux":
        return None
    found = set()
    for pid in pids:
        with suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    kind, _, inode = os.readlink(entry).partition(":[")
                    if kind == "socket":
                        found.add(inode.rstrip("]"))
    return found


def _inode_at(local: int, remote: int) -> str | None:
    """The socket between these two ports of this machine (proc(5): columns are local and remote address, and the tenth is the inode)."""
    near, far = f":{local:04X}", f":{remote:04X}"
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                columns = line.split()
                if columns[1].endswith(near) and columns[2].endswith(far):
                    return columns[9]
    return None
