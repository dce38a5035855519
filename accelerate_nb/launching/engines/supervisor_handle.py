"""A process's end of a supervisor: one that it started, or one that another process had forked for it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import psutil

from accelerate_nb.events.terminal_lines import plain
from accelerate_nb.supervisor.main import BROKEN, UNFIT
from accelerate_nb.transport.channel import Channel
from accelerate_nb.transport.memory_file import memory_file
from accelerate_nb.transport.messages import (
    ForkSupervisor,
    ForkWorker,
    ImportModules,
    OpenGroup,
)
from accelerate_nb.transport.worker_spec import LocalWorker, descriptors_of

# One thread while modules load: OpenMP, BLAS and pyarrow's allocator start theirs as they are imported, and a process with threads
# can't fork safely. And no device: torchao and others ask whether there is a GPU as they are imported, which NVML can answer.
_FORKABLE = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"),
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}


class SupervisorProcess(Protocol):
    """The process of a supervisor: `subprocess.Popen` of one that this process started."""

    @property
    def pid(self) -> int:
        """Its number."""

    @property
    def returncode(self) -> int | None:
        """Its exit code, as far as it is known."""

    def poll(self) -> int | None:
        """Its exit code, where it has ended."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; raises `subprocess.TimeoutExpired` after so many seconds."""

    def terminate(self) -> None:
        """SIGTERM."""

    def kill(self) -> None:
        """SIGKILL."""


class AdoptedProcess:
    """The process of a supervisor that another one forked for this process; its exit code is not known."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._process = psutil.Process(pid)

    def poll(self) -> int | None:
        """0 where it has ended."""
        if self.returncode is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                if self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE:
                    return None
            self.returncode = 0
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; raises `subprocess.TimeoutExpired` after so many seconds."""
        try:
            self._process.wait(timeout)
        except psutil.TimeoutExpired:
            raise subprocess.TimeoutExpired("supervisor", timeout or 0.0) from None
        self.returncode = 0
        return 0

    def terminate(self) -> None:
        """SIGTERM."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process.send_signal(number)


@dataclass(frozen=True, slots=True)
class SupervisorOffer:
    """A supervisor that was forked for another process: the descriptors of its socket and its log, and the modules that it has."""

    control: int
    log: int
    loaded: tuple[str, ...]


class SupervisorHandle:
    """A process's end of one supervisor; what is sent before it is ready waits in the socket."""

    def __init__(self, process: SupervisorProcess, control: Channel, log: int, names: Iterable[str]) -> None:
        self.owner = os.getpid()
        self.loaded = dict.fromkeys(names)
        self._process, self._control, self._log = process, control, log
        self._lock = threading.Lock()
        self._open_groups = 0
        self._last_used = time.monotonic()

    @classmethod
    def start(cls, names: Iterable[str]) -> SupervisorHandle:
        """Start a supervisor that loads these modules."""
        loaded = tuple(names)
        near, far = socket.socketpair()
        log = memory_file("accelerate_nb_supervisor")
        # its death signal fires when the thread that made it ends: only the main thread lasts as long as the process
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        arguments = [str(far.fileno()), str(parent), ",".join(loaded)]
        process = subprocess.Popen(
            [sys.executable, "-m", "accelerate_nb.supervisor.main", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[far.fileno()],
            start_new_session=True,
            env={**os.environ, **_FORKABLE, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        far.close()
        return cls(process, Channel(near), log, loaded)

    def offer(self) -> SupervisorOffer:
        """Have a supervisor forked for another process; the descriptor of its socket is the caller's to hand on and close."""
        near, far = socket.socketpair()
        with far, self._lock:
            self._control.send(ForkSupervisor(), [far.fileno()])
        return SupervisorOffer(near.detach(), self._log, tuple(self.loaded))

    @property
    def pid(self) -> int:
        """The supervisor's process number."""
        return self._process.pid

    def usable(self) -> bool:
        """Whether it still runs, and is this process's own."""
        return self.owner == os.getpid() and self._process.poll() is None

    def ended(self, timeout: float = 2.0) -> int | None:
        """Its exit code, where it ends within `timeout` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        return self._process.returncode

    def unfit_module(self) -> str | None:
        """The module that made it end itself, where that is why it ended."""
        return self._last_line() if self._process.poll() == UNFIT else None

    def broken_module(self) -> str | None:
        """The module that every worker needs and that can't be imported, with the error, where that is why it ended."""
        return self._last_line() if self._process.poll() == BROKEN else None

    def log(self) -> str:
        """Its output."""
        return plain(os.pread(self._log, 1 << 20, 0).decode(errors="replace"))

    def _last_line(self) -> str:
        return self.log().rstrip().rpartition("\n")[2]

    def fork(self, run: str, processes: Sequence[Sequence[LocalWorker]]) -> Channel:
        """Have workers forked; returns the channel that reports on them."""
        near, far = socket.socketpair()
        with far, self._lock:
            self._control.send(OpenGroup(run), [far.fileno()])
            for workers in processes:
                self._control.send(ForkWorker(run, tuple(workers)), descriptors_of(workers))
            self._open_groups += 1
        near.setblocking(False)
        return Channel(near)

    def release(self) -> None:
        """Note that the workers of one `fork` are no longer needed."""
        with self._lock:
            self._open_groups -= 1
            self._last_used = time.monotonic()

    def idle_seconds(self) -> float:
        """The seconds since a launch last used it; 0 while workers run."""
        with self._lock:
            return 0.0 if self._open_groups else time.monotonic() - self._last_used

    def load(self, names: Iterable[str], idle_for: float = 0.0) -> None:
        """Have modules imported when nothing runs, and has not for `idle_for` seconds."""
        news = [name for name in names if name not in self.loaded]
        if news and self.usable():
            self.loaded.update(dict.fromkeys(news))
            with self._lock, contextlib.suppress(OSError):
                self._control.send(ImportModules(tuple(news), idle_for))

    def close(self) -> None:
        """End it, and every worker that it has."""
        self._control.close()
        if self.owner != os.getpid():
            return
        # while it loads modules it does not see that its socket has been closed
        self._process.terminate()
        if self.ended() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._log)
