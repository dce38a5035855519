"""The process that forks workers, watches them, and ends them with everything that they started."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from accelerate_nb.launching.messages import receive_message
from accelerate_nb.launching.sessions import die_with_parent, kill_session
from accelerate_nb.launching.spares import Spares, begin

# The exit code that says: a module made this process unfit for forking (its name is the last line of the log).
UNFIT = 71


@dataclass(slots=True)
class Group:
    """The workers of one run, and the socket on which their kernel hears of them; closing it ends them."""

    sock: socket.socket
    workers: dict[int, list[int]] = field(default_factory=dict)  # process number to ranks
    rest: bytes = b""

    def say(self, **news: object) -> None:
        """Tell the kernel; where it has gone, the end of the socket is handled in its turn."""
        try:
            self.sock.sendall(json.dumps(news).encode() + b"\n")
        except OSError:
            return

    def end(self) -> None:
        """Kill every worker that is left, and what it started."""
        for pid in self.workers:
            kill_session(pid)
            # where it has not made its session yet
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def signal(self, number: int, ranks: Collection[int]) -> None:
        """Send a signal to those that have one of these ranks."""
        for pid, own in self.workers.items():
            if not set(own).isdisjoint(ranks):
                os.kill(pid, number)


class Supervisor:
    """One kernel's supervisor: single-threaded from its first line to its last, so that it can fork at any time."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._groups: dict[str, Group] = {}
        self._wanted: deque[str] = deque()
        self._later: deque[str] = deque()
        self._later_at = 0.0
        self._spares = Spares()
        self._selector = selectors.DefaultSelector()
        self._children, waker = socket.socketpair()
        for end in (self._children, waker):
            end.setblocking(False)
        self._waker = waker
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._close())
        self._selector.register(control, selectors.EVENT_READ, self._hear)
        self._selector.register(self._children, selectors.EVENT_READ, self._reap)

    def serve(self) -> NoReturn:
        """Do what the kernel says until it goes."""
        while True:
            prepare = self._preparation()
            ready = self._selector.select(0 if prepare is not None else self._patience())
            for key, _ in ready:
                key.data()
            if prepare is not None and not ready:
                prepare()

    def _preparation(self) -> Callable[[], None] | None:
        """What can be done for the next launch, in small steps and only while no worker runs."""
        if any(group.workers for group in self._groups.values()):
            return None
        if self._wanted:
            return self._load_next
        if self._spares.are_missing():
            return self._add_spare
        return self._load_late if self._patience() == 0 else None

    def _patience(self) -> float | None:
        """How long to wait before what has time is loaded; `None` where there is no such thing, or workers run."""
        if not self._later or any(group.workers for group in self._groups.values()):
            return None
        return max(0.0, self._later_at - time.monotonic())

    def _load_late(self) -> None:
        self._wanted.extend(self._later)
        self._later.clear()

    def _add_spare(self) -> None:
        self._spares.add(self._forget)

    def _load_next(self) -> None:
        """Load one more module, so that a launch never waits for many."""
        self._spares.forget()
        load(self._wanted.popleft())
        if not self._wanted:
            settle()

    def _hear(self) -> None:
        try:
            message = receive_message(self._control)
        except ConnectionError:
            message = None
        if message is None:
            self._close()
        said, descriptors = message
        if said["do"] == "group":
            self._open_group(said["run"], socket.socket(fileno=descriptors[0]))
        elif said["do"] == "fork":
            self._place(said["run"], said["ranks"], said["orders"], descriptors)
        elif said["patience"]:
            self._later.extend(said["names"])
            self._later_at = time.monotonic() + said["patience"]
        else:
            self._wanted.extend(said["names"])

    def _open_group(self, run: str, sock: socket.socket) -> None:
        self._groups[run] = Group(sock)
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._hear_group(run))

    def _hear_group(self, run: str) -> None:
        group = self._groups[run]
        try:
            data = group.sock.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            self._selector.unregister(group.sock)
            group.sock.close()
            group.end()
            if not group.workers:
                del self._groups[run]
            return
        *lines, group.rest = (group.rest + data).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "signal" in said:
                group.signal(said["signal"], said["ranks"])
            else:
                group.end()

    def _place(self, run: str, ranks: list[int], orders: str, arrived: list[int]) -> None:
        pid = self._spares.use(orders, arrived) or self._fork(orders, arrived)
        for descriptor in arrived:
            os.close(descriptor)
        group = self._groups[run]
        group.workers[pid] = ranks
        self._spares.expect(len(group.workers))
        group.say(pid=[ranks, pid])

    def _fork(self, orders: str, arrived: list[int]) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._forget()
            begin(orders, arrived, parent)
        return pid

    def _forget(self) -> None:
        """In a forked worker: close what belongs to the supervisor."""
        signal.set_wakeup_fd(-1)
        self._selector.close()
        self._spares.forget()
        for sock in (self._control, self._children, self._waker, *(group.sock for group in self._groups.values())):
            sock.close()

    def _reap(self) -> None:
        self._children.recv(1 << 12)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._gone(pid, os.waitstatus_to_exitcode(status))

    def _gone(self, pid: int, code: int) -> None:
        self._spares.gone(pid)
        for run, group in list(self._groups.items()):
            if pid in group.workers:
                ranks = group.workers.pop(pid)
                kill_session(pid)
                group.say(exit=[ranks, code])
                if group.sock.fileno() < 0 and not group.workers:
                    del self._groups[run]

    def _close(self) -> NoReturn:
        """The kernel has gone: nothing of it stays."""
        for group in self._groups.values():
            group.end()
        os._exit(0)


def load(name: str) -> None:
    """Import a module so that every worker has it; one that starts a thread or wakes a driver ends this process."""
    try:
        importlib.import_module(name)
    except BaseException as error:  # noqa: BLE001 - anybody's module; a worker that needs it will say what is wrong
        sys.stderr.write(f"{name} was not loaded: {error!r}\n")
    if not is_fit():
        sys.stderr.write(f"{name}\n")
        sys.stderr.flush()
        os._exit(UNFIT)


def settle() -> None:
    """What is loaded now stays: no garbage collection in a worker touches (and so copies) its pages."""
    gc.collect()
    gc.freeze()


def is_fit() -> bool:
    """Whether this process may fork: it has one thread, and no driver of an accelerator is awake in it."""
    if sys.platform != "linux":
        return True
    return _one_thread() and not any(_opened(("/dev/nvidia", "/dev/accel", "/dev/vfio/")))


def _one_thread() -> bool:
    # a thread that is just ending is given a moment
    for _ in range(20):
        if len(list(Path("/proc/self/task").iterdir())) == 1:
            return True
        time.sleep(0.01)
    return False


def _opened(prefixes: tuple[str, ...]) -> Iterable[str]:
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith(prefixes):
            yield target


def main() -> NoReturn:
    """Begin: `python -m accelerate_nb.launching.supervisor CONTROL PARENT NAMES`, PARENT 0 where its thread may end before it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if parent := int(sys.argv[2]):
        # not SIGKILL: it has workers to end, and a worker that has inherited the control socket may keep that from closing
        die_with_parent(parent, by=signal.SIGTERM)
    supervisor = Supervisor(socket.socket(fileno=int(sys.argv[1])))
    for name in sys.argv[3].split(","):
        load(name)
    settle()
    supervisor.serve()


if __name__ == "__main__":
    main()
