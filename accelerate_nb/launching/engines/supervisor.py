"""Workers forked by a supervisor: its handle in the kernel."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from accelerate_nb.devices import xla
from accelerate_nb.errors import LaunchError
from accelerate_nb.launching.messages import send_message
from accelerate_nb.launching.order import Order, as_text
from accelerate_nb.launching.packing import memory_file
from accelerate_nb.launching.sessions import kill_session
from accelerate_nb.launching.supervisor import UNFIT

# What every supervisor has loaded: torch, what a worker shows things with, and the worker side of this package (by name:
# the kernel side never imports it).
_FIRST = ("torch", "torch.distributed", "numpy", "IPython.display", "accelerate_nb.runtime.accelerator")
# What it loads when it has had nothing to do for some seconds: torch imports its compiler, a second's work during which no
# launch can begin, when the first optimizer is made.
_LATER = ("torch._dynamo",)
_PATIENCE = 2.0
# One thread while modules load: OpenMP and BLAS start theirs as they are imported, and a process with threads can't fork safely.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")


class SupervisorHandle:
    """The kernel's end of one supervisor process; what is sent before it is ready waits in the socket."""

    def __init__(self, names: Iterable[str]) -> None:
        self.owner = os.getpid()
        self.loaded = dict.fromkeys(names)
        self._control, far = socket.socketpair()
        self._log = memory_file("accelerate_nb_supervisor")
        self._lock = threading.Lock()
        # its death signal fires when the thread that made it ends: only the main thread lasts as long as the process
        parent = self.owner if threading.current_thread() is threading.main_thread() else 0
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "accelerate_nb.launching.supervisor",
                str(far.fileno()),
                str(parent),
                ",".join(self.loaded),
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[far.fileno()],
            start_new_session=True,
            env={**os.environ, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        far.close()

    @property
    def pid(self) -> int:
        """The supervisor's process number."""
        return self._process.pid

    def usable(self) -> bool:
        """Whether it still runs, and is this process's own."""
        return self.owner == os.getpid() and self._process.poll() is None

    def ended(self, patience: float = 2.0) -> int | None:
        """Its exit code, where it ends within `patience` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        return self._process.returncode

    def unfit_module(self) -> str | None:
        """The module that made it end itself, where that is why it ended."""
        return self.log().rstrip().rpartition("\n")[2] if self._process.poll() == UNFIT else None

    def log(self) -> str:
        """What it wrote."""
        return os.pread(self._log, 1 << 20, 0).decode(errors="replace")

    def fork(self, run: str, orders: Sequence[Sequence[Order]]) -> socket.socket:
        """Have workers forked; gives the socket on which they are heard of."""
        near, far = socket.socketpair()
        with far, self._lock:
            send_message(self._control, {"do": "group", "run": run}, [far.fileno()])
            for own in orders:
                ranks = [order.seat.rank for order in own]
                message = {"do": "fork", "run": run, "ranks": ranks, "orders": as_text(own)}
                send_message(self._control, message, [one for order in own for one in order.descriptors.all()])
        return near

    def load(self, names: Iterable[str], patience: float = 0.0) -> None:
        """Have modules imported when nothing runs, and has not for `patience` seconds."""
        news = [name for name in names if name not in self.loaded]
        if news and self.usable():
            self.loaded.update(dict.fromkeys(news))
            with self._lock, contextlib.suppress(OSError):
                send_message(self._control, {"do": "import", "names": news, "patience": patience})

    def close(self) -> None:
        """End it, and every worker that it has."""
        self._control.close()
        if self.owner != os.getpid():
            return
        if self.ended() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._log)


class _Warmth:
    """The process's supervisor, and what is known about modules."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.handle: SupervisorHandle | None = None
        self.hints: dict[str, None] = {}
        self.unfit: set[str] = set()

    def fit(self, names: Iterable[str]) -> list[str]:
        """Those of the modules that can be loaded: none that made a supervisor unfit, and none below such a one."""
        return [name for name in names if self.unfit.isdisjoint(_with_parents(name))]


_warmth: ContextVar[_Warmth] = ContextVar("accelerate_nb_warmth", default=_Warmth())  # noqa: B039 - one for all threads


def warm() -> SupervisorHandle:
    """The process's supervisor, started where there is none; returns at once, while it loads."""
    held = _warmth.get()
    with held.lock:
        if held.handle is None or not held.handle.usable():
            if held.handle is not None:
                _learn_from(held.handle, held)
                held.handle.close()
            held.handle = SupervisorHandle(held.fit((*_FIRST, *xla.loaded_early(os.environ))))
            atexit.unregister(cool)
            atexit.register(cool)
            held.handle.load(held.fit(held.hints))
            held.handle.load(held.fit(_LATER), _PATIENCE)
        return held.handle


def hint(names: Iterable[str]) -> None:
    """Installed modules that the next launches will need: the supervisor loads them when it is idle."""
    held = _warmth.get()
    useful = [name for name in held.fit(names) if name not in held.hints]
    held.hints.update(dict.fromkeys(useful))
    if useful and held.handle is not None and held.handle.usable():
        held.handle.load(useful)


def cool() -> None:
    """End the process's supervisor, where there is one."""
    held = _warmth.get()
    with held.lock:
        if held.handle is not None:
            held.handle.close()
            held.handle = None


def _learn_from(handle: SupervisorHandle, held: _Warmth) -> None:
    unfit = handle.unfit_module()
    if unfit is not None:
        held.unfit.add(unfit)
        held.hints.pop(unfit, None)


def _with_parents(name: str) -> Iterator[str]:
    """A module's name and those of the packages that are loaded with it."""
    while name:
        yield name
        name = name.rpartition(".")[0]


class Supervised:
    """Workers that a supervisor forked."""

    def __init__(self, handle: SupervisorHandle, sock: socket.socket) -> None:
        self._handle = handle
        self._socket = sock
        self._rest = b""
        self._ranks: dict[int, list[int]] = {}
        self._codes: dict[int, int] = {}
        self._lost = False
        self._lock = threading.Lock()
        sock.setblocking(False)

    def watched(self) -> Sequence[int]:
        """The socket, while it is open."""
        return [] if self._lost else [self._socket.fileno()]

    def news(self) -> None:
        """Read what the supervisor says of the workers."""
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost = True
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(json.loads(line))

    def exit_codes(self) -> Mapping[int, int]:
        """Rank to exit code."""
        return self._codes

    def signal(self, number: int, ranks: Collection[int]) -> None:
        """Have the supervisor send a signal to those that run and have one of these ranks."""
        self._say(signal=int(number), ranks=list(ranks))

    def kill(self) -> None:
        """Have the supervisor kill all; where it has gone, do it here: nobody has reaped its children's numbers yet."""
        self._say(kill=True)
        if self._lost:
            for pid, ranks in self._ranks.items():
                if not self._codes.keys() & ranks:
                    kill_session(pid)
                    self._codes.update(dict.fromkeys(ranks, -int(signal.SIGKILL)))

    def lost(self) -> str | None:
        """The supervisor's end, where it has ended."""
        if not self._lost:
            return None
        code, last = self._handle.ended(), self._handle.log()[-2000:].strip()
        return f"the supervisor (process {self._handle.pid}) ended with code {code}" + (f":\n{last}" if last else "")

    def close(self) -> None:
        """Close the socket; the supervisor kills whatever is left."""
        self._socket.close()

    def _say(self, **wish: Any) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(wish).encode() + b"\n")

    def _take(self, said: dict[str, Any]) -> None:
        if "pid" in said:
            ranks, pid = said["pid"]
            self._ranks[pid] = ranks
        else:
            ranks, code = said["exit"]
            self._codes.update(dict.fromkeys(ranks, code))


class FromSupervisor:
    """Places workers by asking the process's supervisor to fork them."""

    def start(self, orders: Sequence[Sequence[Order]]) -> Supervised:
        """Fork; a supervisor that turns out to have died is replaced once."""
        seat = orders[0][0].seat
        run = f"{seat.run}/{seat.attempt}"
        handle = warm()
        try:
            return Supervised(handle, handle.fork(run, orders))
        except OSError:
            # it died between the look at it and the message
            handle = _replaced(handle)
        try:
            return Supervised(handle, handle.fork(run, orders))
        except OSError:
            raise LaunchError(
                f"{seat.size} workers were asked for, but the process that forks them does not start. It said:\n"
                f"{handle.log()[-2000:]}\nTry start_method='spawn'."
            ) from None


def _replaced(handle: SupervisorHandle) -> SupervisorHandle:
    handle.ended()
    return warm()
