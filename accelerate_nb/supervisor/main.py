"""The process that forks workers, watches them, and ends them with everything that they started."""

import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, ItemsView, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from accelerate_nb.devices.gpus import cuda_is_awake
from accelerate_nb.devices.nvml import GpuGauge
from accelerate_nb.transport import messages
from accelerate_nb.transport.channel import Channel, ReceivedMessage, blocking_pair
from accelerate_nb.transport.worker_spec import LocalWorker
from accelerate_nb.worker.main import work
from accelerate_nb.worker.process_session import die_with_parent, kill_sessions

# The exit code after a module made this process unfit for forking (its name is the last line of the log).
UNFIT = 71
# The one after a module that no worker can do without can't be loaded (why is the last line of the log). To try again in
# the same process would raise something else, which hides the reason.
BROKEN = 72
# The one where kernel and supervisor don't speak the same version of the protocol.
FOREIGN = 73
_NEEDED = frozenset({"torch", "torch.distributed", "numpy"})
# How many processes are kept in the pool where nothing is known, and how many at most.
_FEWEST = 2
_MOST = 8


@dataclass(slots=True)
class ForkedGroup:
    """The workers of one run, and the channel that reports on them to their kernel; closing it ends them."""

    # closed once its kernel has left it: then it is there only until those that were killed have ended
    channel: Channel
    workers: dict[int, int] = field(default_factory=dict)  # process number to rank
    # whether its workers were signalled to end, some of which may take their time
    is_stopping: bool = False
    # the ranks that were to end before they were forked, with the signal
    ended_early: dict[int, int] = field(default_factory=dict)
    is_killed: bool = False
    # the reports for which the channel has no room yet
    unsent: deque[messages.Message] = field(default_factory=deque)

    def end(self) -> None:
        """Kill every worker that is left, and what it started; none is forked any more."""
        self.is_stopping = self.is_killed = True
        kill_sessions(*self.workers)
        for pid in self.workers:
            # where it has not made its session yet
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def signal(self, number: int, ranks: Collection[int]) -> None:
        if number in {signal.SIGINT, signal.SIGTERM, signal.SIGKILL}:
            self.is_stopping |= number != signal.SIGTERM
            self.ended_early.update(dict.fromkeys(ranks, number))
        for pid, rank in self.workers.items():
            if rank in ranks:
                os.kill(pid, number)

    def send_unsent(self) -> None:
        while self.unsent:
            try:
                self.channel.send(self.unsent[0])
            except BlockingIOError:
                return
            except OSError:
                # the kernel has gone: the end of the channel is handled in its turn
                self.unsent.clear()
                return
            self.unsent.popleft()

    def receive(self) -> None:
        """Carry out what the kernel has sent; where it has left, end the workers."""
        for received in self.channel.receive_ready():
            match received.message:
                case messages.SignalRanks(number, ranks):
                    self.signal(number, ranks)
                case messages.KillGroup():
                    self.end()
                case _:
                    self.channel.refuse(received)


class Supervisor:
    """One kernel's supervisor: single-threaded from its first line to its last, so that it can fork at any time."""

    def __init__(self, control: Channel) -> None:
        self._control = control
        self._groups: dict[str, ForkedGroup] = {}
        # the kernel's variables, without what modules set as they are imported
        self._environ = dict(os.environ)
        self._wanted: deque[str] = deque()
        self._after_run: deque[str] = deque()
        self._idle_timeout = 0.0
        self._idle_since = 0.0
        self._prefork_pool = PreforkPool()
        self._selector = selectors.DefaultSelector()
        self._children, waker = socket.socketpair()
        for end in (self._children, waker):
            end.setblocking(False)
        self._waker = waker
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._close())
        self._selector.register(control, selectors.EVENT_READ, self._on_control)
        self._selector.register(self._children, selectors.EVENT_READ, self._reap)

    def serve(self) -> NoReturn:
        while True:
            prepare = self._preparation()
            ready = self._selector.select(0 if prepare is not None else self._timeout())
            # first of all which groups are left by their kernel: nothing is forked for them any more
            for key, _ in sorted(ready, key=lambda ready: ready[0].fileobj is self._control):
                key.data()
            if prepare is not None and not ready:
                prepare()

    def _preparation(self) -> Callable[[], None] | None:
        """The next small step of preparation for a launch; none while a worker runs that is not about to end."""
        running = [group for group in self._groups.values() if group.workers]
        if any(not group.is_stopping for group in running):
            return None
        if self._prefork_pool.are_missing() and not self._wanted:
            return lambda: self._prefork_pool.add(self._forget)
        if running:
            return None
        if not self._wanted and self._timeout() == 0:
            self._wanted.extend(self._after_run)
            self._after_run.clear()
        return self._load_next if self._wanted else None

    def _timeout(self) -> float | None:
        """The seconds to wait before modules for idle times are loaded; `None` where there are none, or workers run."""
        if not self._after_run or any(group.workers for group in self._groups.values()):
            return None
        return max(0.0, self._idle_since + self._idle_timeout - time.monotonic())

    def _load_next(self) -> None:
        """Load one more module, so that a launch never waits for many."""
        self._prefork_pool.forget()
        with variables_read() as names:
            load(self._wanted.popleft())
        if names:
            self._control.send_at_once(messages.VariablesRead({name: self._environ.get(name) for name in names}))
        if not self._wanted:
            settle()

    def _on_control(self) -> None:
        for received in self._control.receive_ready():
            self._carry_out(received)
        if (error := self._control.error) is not None:
            # nothing that this kernel sends will ever be understood
            why = "the package was changed while the notebook ran. Restart its kernel"
            sys.stderr.write(f"{error}: {why}.\n" if error.refusal == "version" else f"{error}\n")
            sys.stderr.flush()
            self._close(FOREIGN)
        if self._control.is_ended:
            self._close()

    def _carry_out(self, received: ReceivedMessage) -> None:
        message, descriptors = received
        match message:
            case messages.OpenGroup(run):
                sock = socket.socket(fileno=descriptors[0])
                sock.setblocking(False)
                self._groups[run] = group = ForkedGroup(Channel(sock))
                self._selector.register(group.channel, selectors.EVENT_READ, lambda: self._on_group(run))
            case messages.ForkWorker():
                self._start_worker(message, descriptors)
            case messages.ForkSupervisor():
                self._fork_supervisor(descriptors[0])
            case messages.ImportModules(names, environ, idle_for):
                self._environ = environ
                os.environ.clear()
                os.environ.update(environ)
                if idle_for:
                    self._after_run.extend(names)
                    self._idle_timeout, self._idle_since = idle_for, time.monotonic()
                else:
                    self._wanted.extend(names)
            case _:
                self._control.refuse(received)

    def _report(self, run: str, message: messages.Message) -> None:
        group = self._groups[run]
        # the kernel reads in its turn: it may be sending as many messages itself
        group.unsent.append(message)
        group.send_unsent()
        if group.unsent and not group.channel.is_closed:
            events = selectors.EVENT_READ | selectors.EVENT_WRITE
            self._selector.modify(group.channel, events, lambda: self._on_group(run))

    def _on_group(self, run: str) -> None:
        group = self._groups[run]
        if group.unsent:
            group.send_unsent()
            if not group.unsent:
                self._selector.modify(group.channel, selectors.EVENT_READ, lambda: self._on_group(run))
        group.receive()
        if group.channel.is_ended:
            self._selector.unregister(group.channel)
            group.channel.close()
            group.end()
            if not group.workers:
                del self._groups[run]

    def _start_worker(self, request: messages.ForkWorker, descriptors: Sequence[int]) -> None:
        group = self._groups.get(request.run)
        if group is not None and not group.channel.is_closed:
            # its kernel may have left it meanwhile: then nothing is forked for it any more
            self._on_group(request.run)
        pid, rank = 0, request.worker.rank
        if group is not None and not group.channel.is_closed:
            # that which was to end it before it was forked
            number = int(signal.SIGKILL) if group.is_killed else group.ended_early.get(rank)
            if number is not None:
                self._report(request.run, messages.WorkerExited(rank, -number))
            else:
                try:
                    pid = self._prefork_pool.use(request.worker, descriptors) or self._fork(request.worker, descriptors)
                except OSError as error:
                    self._prefork_pool.give_up()
                    self._report(request.run, messages.ForkFailed(rank, error.errno or 0))
        for descriptor in descriptors:
            os.close(descriptor)
        if group is None or not pid:
            return
        group.workers[pid] = rank
        self._prefork_pool.expect(len(group.workers))
        self._report(request.run, messages.WorkerStarted(rank, pid))

    def _fork_supervisor(self, control: int) -> None:
        """Fork a supervisor for another process; it ends with that one, and not with this one."""
        pid = os.fork()
        if pid == 0:
            os.setsid()
            self._forget()
            self._control = Channel(socket.socket(fileno=control))
            self._control.try_send(messages.SupervisorStarted(os.getpid()))
            Supervisor(self._control).serve()
        os.close(control)

    def _fork(self, worker: LocalWorker, descriptors: Sequence[int]) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._forget()
            work(worker.with_descriptors(descriptors), parent)
        return pid

    def _forget(self) -> None:
        signal.set_wakeup_fd(-1)
        self._selector.close()
        self._prefork_pool.forget()
        for channel in (self._control, *(group.channel for group in self._groups.values())):
            channel.close()
        self._children.close()
        self._waker.close()

    def _reap(self) -> None:
        self._children.recv(1 << 12)
        ended: dict[int, int] = {}
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                ended[found[0]] = os.waitstatus_to_exitcode(found[1])
        # many may end at once, and each look for what they have left takes milliseconds
        kill_sessions(*(pid for pid in ended if any(pid in group.workers for group in self._groups.values())))
        for pid, code in ended.items():
            self._prefork_pool.gone(pid)
            for run, group in list(self._groups.items()):
                if (rank := group.workers.pop(pid, None)) is None:
                    continue
                # who launches again does so soon, above all after an interrupt
                self._idle_since = time.monotonic()
                self._report(run, messages.WorkerExited(rank, code))
                if group.channel.is_closed and not group.workers:
                    del self._groups[run]

    def _close(self, code: int = 0) -> NoReturn:
        """The kernel has gone, or can't be understood: nothing of it stays."""
        for group in self._groups.values():
            group.end()
        os._exit(code)


def load(name: str) -> None:
    """Import a module so that every worker has it; one that starts a thread or wakes a driver ends this process."""
    try:
        with capability_without_cuda():
            importlib.import_module(name)
    except BaseException as error:  # noqa: BLE001 - anybody's module; a worker that needs it will report the error
        sys.stderr.write(f"{name} was not loaded: {error!r}\n")
        if name in _NEEDED:
            sys.stderr.write(f"{name} can't be imported: {type(error).__name__}: {' '.join(str(error).split())}\n")
            sys.stderr.flush()
            os._exit(BROKEN)
    if not is_fit():
        sys.stderr.write(f"{name}\n")
        sys.stderr.flush()
        os._exit(UNFIT)


@contextlib.contextmanager
def capability_without_cuda() -> Iterator[None]:
    """A block in which torch's question for a GPU's compute capability, which torchao asks as it is imported, wakes no CUDA."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None:
        yield
        return
    of_torch = cuda.get_device_capability

    def get_device_capability(device: Any = None) -> tuple[int, int]:
        found = None if cuda.is_initialized() else GpuGauge(os.environ).capability
        return found or of_torch(device)

    cuda.get_device_capability = get_device_capability
    try:
        yield
    finally:
        cuda.get_device_capability = of_torch


@contextlib.contextmanager
def variables_read() -> Iterator[set[str]]:
    """A block that notes which variables are read from `os.environ`; who looks through all of them depends on none."""
    names: set[str] = set()
    environ: Any = type(os.environ)
    of_python = environ.__getitem__

    def get(self: Any, name: Any) -> str:
        if isinstance(name, str) and sys._getframe(1).f_code is not ItemsView.__iter__.__code__:
            names.add(name)
        return str(of_python(self, name))

    environ.__getitem__ = get
    try:
        yield names
    finally:
        environ.__getitem__ = of_python


def settle() -> None:
    """Freeze what is loaded: no garbage collection in a worker touches (and so copies) its pages."""
    gc.collect()
    gc.freeze()


def is_fit() -> bool:
    """Whether this process may fork: it has one thread, and no driver of an accelerator is awake in it."""
    if sys.platform != "linux":
        return True
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        return False
    # a thread that is about to exit is given a moment
    for _ in range(20):
        if _threads() == 1:
            break
        time.sleep(0.01)
    else:
        return False
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(entry).startswith(("/dev/accel", "/dev/vfio/")):
                return False
    return not cuda_is_awake()


def _threads() -> int:
    """The number of threads but those that driver 580 starts in a process that only asks NVML: one forked from it uses CUDA all the same."""
    count = 0
    for thread in Path("/proc/self/task").iterdir():
        # one that has exited meanwhile has no name
        with contextlib.suppress(OSError):
            count += not (thread / "comm").read_text().startswith("cuda0")
    return count


def main() -> NoReturn:
    """Begin: `python -m accelerate_nb.supervisor.main CONTROL PARENT NAMES`, PARENT 0 where its thread may end before it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if parent := int(sys.argv[2]):
        # not SIGKILL: it has workers to end, and a worker that has inherited the control socket may keep that from closing
        die_with_parent(parent, by=signal.SIGTERM)
    supervisor = Supervisor(Channel(socket.socket(fileno=int(sys.argv[1]))))
    for name in sys.argv[3].split(","):
        load(name)
    settle()
    supervisor.serve()


class PreforkPool:
    """The processes that wait; each is a copy of the supervisor as it was, so they are given up when that changes."""

    def __init__(self) -> None:
        self._waiting: dict[int, Channel] = {}
        self._target = _FEWEST

    def expect(self, size: int) -> None:
        self._target = min(_MOST, max(self._target, size))

    def are_missing(self) -> bool:
        return len(self._waiting) < self._target

    def add(self, forget: Callable[[], None]) -> None:
        """Fork one more; `forget` closes, in the new process, what belongs to this one."""
        parent = os.getpid()
        try:
            near, far = blocking_pair()
            pid = os.fork()
        except OSError:
            # a limit of the system's is reached, which a launch reports
            self._target = len(self._waiting)
            return
        if pid == 0:
            forget()
            near.close()
            _wait(Channel(far), parent)
        far.close()
        self._waiting[pid] = Channel(near)

    def use(self, worker: LocalWorker, descriptors: Sequence[int]) -> int | None:
        """Make one of them a worker; returns its process number, or `None` where there is none."""
        while self._waiting:
            pid, channel = self._waiting.popitem()
            with contextlib.closing(channel):
                # one that was killed takes none
                if channel.try_send(messages.BeginWorker(worker), descriptors):
                    return pid
        return None

    def gone(self, pid: int) -> None:
        if (channel := self._waiting.pop(pid, None)) is not None:
            channel.close()

    def give_up(self) -> None:
        """Keep none, since a limit of the system's is reached: the next launch has their room."""
        self.forget()
        self._target = 0

    def forget(self) -> None:
        """Close what this process holds of them; where no other does, they end."""
        for channel in self._waiting.values():
            channel.close()
        self._waiting.clear()


def _wait(channel: Channel, parent: int) -> NoReturn:
    try:
        die_with_parent(parent)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        received = channel.receive()
        if received is not None and isinstance(received.message, messages.BeginWorker):
            channel.close()
            work(received.message.worker.with_descriptors(received.descriptors), parent)
    finally:
        # nobody needs it, or nobody is there any more
        os._exit(0)


if __name__ == "__main__":
    main()
