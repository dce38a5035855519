"""The supervisor at this end: its handle, the workers that it forks, and the memory that supervisors hold."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import psutil

from accelerate_nb.config.launch import LaunchingConfig
from accelerate_nb.devices.xla import loaded_early
from accelerate_nb.errors import LaunchError
from accelerate_nb.events.terminal_lines import plain
from accelerate_nb.failures.process_limits import limit_reached
from accelerate_nb.sources.installed_packages import installation_times
from accelerate_nb.supervisor.main import BROKEN, UNFIT
from accelerate_nb.transport import messages
from accelerate_nb.transport.channel import Channel, blocking_pair
from accelerate_nb.transport.memory_file import memory_file
from accelerate_nb.transport.worker_spec import LocalWorker, current_folder, python_command, python_path
from accelerate_nb.user_warnings import warn_user
from accelerate_nb.worker.process_session import kill_sessions

# One thread while modules load: OpenMP, BLAS and pyarrow's allocator start theirs as they are imported, and a process with threads
# can't fork safely. And no device: torchao and others ask whether there is a GPU as they are imported, which NVML can answer.
_FORKABLE = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"),
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
# What every supervisor has loaded: torch, what a worker shows things with, and the worker side of this package (by name:
# the kernel side never imports it).
_PRELOADED = ("torch", "torch.distributed", "numpy", "IPython.display", "accelerate_nb.runtime.accelerator.accelerator")
# What it loads when it has had nothing to do for some seconds: torch imports its compiler, a second's work during which no
# launch can begin, when the first optimizer is made.
_LOADED_WHEN_IDLE = ("torch._dynamo",)
_IDLE_BEFORE_LOADING = 2.0
# Seconds that killed workers may take to end, which is waited for where a launch was refused.
_KILLED_WITHIN = 5.0


@dataclass(frozen=True, slots=True)
class SupervisorOffer:
    """A supervisor that was forked for another process: the descriptors of its socket and its log, and the modules that it has."""

    control: int
    log: int
    loaded: tuple[str, ...]


class SupervisorHandle:
    """A process's end of one supervisor; what is sent before it is ready waits in the socket."""

    def __init__(self, process: psutil.Process, control: Channel, log: int, names: Iterable[str]) -> None:
        self.owner = os.getpid()
        self.loaded = dict.fromkeys(names)
        self._process, self._control, self._log = process, control, log
        self._lock, self._wait_lock = threading.Lock(), threading.Lock()
        self._installation = installation_times()
        self._variables_read: set[tuple[str, str | None]] = set()
        self._open_groups = 0
        self._is_retired = False
        self._last_used = time.monotonic()

    @classmethod
    def start(cls, names: Iterable[str]) -> SupervisorHandle:
        """Start a supervisor that loads these modules."""
        loaded = tuple(names)
        near, far = blocking_pair()
        log = memory_file("accelerate_nb_supervisor")
        # its death signal fires when the thread that made it ends: only the main thread lasts as long as the process
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        arguments = [str(far.fileno()), str(parent), ",".join(loaded)]
        process = psutil.Popen(
            [*python_command("accelerate_nb.supervisor.main"), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[far.fileno()],
            start_new_session=True,
            # torch can't be imported in a folder that was removed
            cwd=current_folder() or "/",
            env={**_environ(), "PYTHONPATH": python_path()},
        )
        far.close()
        return cls(process, Channel(near), log, loaded)

    def offer(self) -> SupervisorOffer:
        """Have a supervisor forked for another process; the descriptor of its socket is the caller's to hand on and close."""
        near, far = blocking_pair()
        with far, self._lock:
            self._control.send(messages.ForkSupervisor(), [far.fileno()])
        return SupervisorOffer(near.detach(), self._log, tuple(self.loaded))

    @property
    def pid(self) -> int:
        """The supervisor's process number."""
        return int(self._process.pid)

    def usable(self) -> bool:
        """Whether it still runs, and is this process's own."""
        return self.owner == os.getpid() and self.ended(0.0) is None

    def is_current(self) -> bool:
        """Whether a new one would be the same: the same packages are installed, and variables that its modules read have their values."""
        environ = _environ()
        with self._lock:
            for received in self._control.receive_ready():
                if isinstance(received.message, messages.VariablesRead):
                    self._variables_read.update(received.message.values.items())
            is_same = all(environ.get(name) == value for name, value in self._variables_read)
        return is_same and self._installation == installation_times()

    def ended(self, timeout: float = 2.0) -> int | None:
        """Its exit code, where it ends within `timeout` seconds; 0 of one that another process forked."""
        with self._wait_lock:
            try:
                return self._process.wait(timeout) or 0
            except psutil.TimeoutExpired:
                with contextlib.suppress(psutil.NoSuchProcess):
                    # a number stays where nobody takes its code
                    return 0 if self._process.status() == psutil.STATUS_ZOMBIE else None
                return 0

    def why_ended(self, code: int) -> str | None:
        """The last line of its log, where it ended itself with this code: the module that is why."""
        return self.log().rstrip().rpartition("\n")[2] if self.ended(0.0) == code else None

    def log(self) -> str:
        """Its output."""
        return plain(os.pread(self._log, 1 << 20, 0).decode(errors="replace"))

    def fork(self, run: str, workers: Sequence[LocalWorker]) -> Channel:
        """Have workers forked; returns the channel that reports on them."""
        near, far = blocking_pair()
        with far, self._lock:
            self._control.send(messages.OpenGroup(run), [far.fileno()])
            for worker in workers:
                self._control.send(messages.ForkWorker(run, worker), worker.descriptors.all())
            self._open_groups += 1
        near.setblocking(False)
        return Channel(near)

    def release(self) -> None:
        """Note that the workers of one `fork` are no longer needed."""
        with self._lock:
            self._open_groups -= 1
            self._last_used = time.monotonic()
        if self._is_retired:
            self.retire()

    def retire(self) -> None:
        """Close it once the workers that it has are no longer needed."""
        self._is_retired = True
        if not self._open_groups:
            self.close()

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
                self._control.send(messages.ImportModules(tuple(news), _environ(), idle_for))

    def close(self) -> None:
        """End it, and every worker that it has."""
        self._control.close()
        if self.owner != os.getpid():
            return
        # while it loads modules it does not see that its socket has been closed
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process.terminate()
            if self.ended() is None:
                self._process.kill()
                self.ended()
        os.close(self._log)


def _environ() -> dict[str, str]:
    """The environment in which a supervisor loads modules now."""
    return {**os.environ, **_FORKABLE}


class _SupervisorState:
    """The process's supervisor, and what is known about modules."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.handle: SupervisorHandle | None = None
        self.preloads: dict[str, None] = {}
        self.unfit: set[str] = set()
        self.idle_timeout = LaunchingConfig.supervisor_idle_timeout
        self.idle_timer: threading.Timer | None = None

    def fit(self, names: Iterable[str]) -> list[str]:
        """Those of the modules that can be loaded: none that made a supervisor unfit, and none below such a one."""
        return [name for name in names if not any(f"{name}.".startswith(f"{unfit}.") for unfit in self.unfit)]

    def watch_idle(self, seconds: float) -> None:
        """End the supervisor when no launch has used it for `idle_timeout`; look again after `seconds`."""
        self.idle_timer = threading.Timer(seconds, self._end_when_idle)
        self.idle_timer.name, self.idle_timer.daemon = "accelerate_nb_supervisor_idle", True
        self.idle_timer.start()

    def stop_watching(self) -> None:
        """Let the supervisor stay, however long it is idle."""
        if self.idle_timer is not None:
            self.idle_timer.cancel()
            self.idle_timer = None

    def end(self) -> None:
        """End the supervisor, where there is one."""
        self.stop_watching()
        if self.handle is not None:
            self.handle.close()
            self.handle = None

    def _end_when_idle(self) -> None:
        with self.lock:
            if self.idle_timer is not threading.current_thread() or self.handle is None:
                return
            rest = self.idle_timeout - self.handle.idle_seconds()
            if rest > 0:
                self.watch_idle(rest)
            else:
                self.end()


_warmth: ContextVar[_SupervisorState] = ContextVar("accelerate_nb_warmth", default=_SupervisorState())  # noqa: B039 - one for all threads


def warm(idle_timeout: float | None = None) -> SupervisorHandle:
    """The process's supervisor, which ends after `idle_timeout` seconds without a launch (0: never; `None`: as before)."""
    # returns at once: one that is started here loads meanwhile
    held = _warmth.get()
    with held.lock:
        if idle_timeout is not None and idle_timeout != held.idle_timeout:
            held.idle_timeout = idle_timeout
            held.stop_watching()
        if held.handle is not None and held.handle.usable() and not held.handle.is_current():
            held.handle.retire()
            held.handle = None
        if held.handle is None or not held.handle.usable():
            if held.handle is not None:
                if (unfit := held.handle.why_ended(UNFIT)) is not None:
                    held.unfit.add(unfit)
                    held.preloads.pop(unfit, None)
                    warn_user(
                        f"{unfit} starts a thread or wakes a GPU as it is imported, so it can't be loaded ahead of a launch: each worker that "
                        "needs it imports it, which takes the time that its import takes."
                    )
                held.handle.close()
            held.handle = SupervisorHandle.start(held.fit((*_PRELOADED, *loaded_early(os.environ))))
            atexit.unregister(cool)
            atexit.register(cool)
            held.handle.load(held.fit(held.preloads))
            held.handle.load(held.fit(_LOADED_WHEN_IDLE), _IDLE_BEFORE_LOADING)
        if held.idle_timer is None and held.idle_timeout:
            held.watch_idle(held.idle_timeout)
        return held.handle


def adopt(offer: SupervisorOffer, timeout: float = 60.0) -> None:
    """Make an offered supervisor this process's own; where it does not come in time, the next launch starts another."""
    sock = socket.socket(fileno=offer.control)
    sock.settimeout(timeout)
    channel = Channel(sock)
    try:
        received = channel.receive()
        if received is None or not isinstance(received.message, messages.SupervisorStarted):
            raise ConnectionError("the offered supervisor has ended")
        process = psutil.Process(received.message.pid)
    except (OSError, psutil.Error):
        channel.close()
        os.close(offer.log)
        return
    sock.settimeout(None)
    held = _warmth.get()
    with held.lock:
        held.handle = SupervisorHandle(process, channel, offer.log, offer.loaded)
        atexit.register(cool)


def preload(names: Iterable[str]) -> None:
    """Installed modules that the next launches will need: the supervisor loads them when it is idle."""
    held = _warmth.get()
    useful = [name for name in held.fit(names) if name not in held.preloads]
    held.preloads.update(dict.fromkeys(useful))
    if useful and held.handle is not None and held.handle.usable():
        held.handle.load(useful)


def cool() -> None:
    """End the process's supervisor, where there is one."""
    held = _warmth.get()
    with held.lock:
        held.end()


class SupervisorWorkers:
    """Workers of these ranks, which a supervisor forks."""

    def __init__(self, handle: SupervisorHandle, channel: Channel, ranks: Sequence[int]) -> None:
        self._handle = handle
        self._channel = channel
        self._requested = tuple(ranks)
        self._ranks: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        self._lost = self._withdrawn = False
        # the system's reasons why workers could not be forked, by rank
        self._not_forked: dict[int, int] = {}

    def exit_descriptors(self) -> Sequence[int]:
        return [] if self._lost or self._withdrawn else [self._channel.fileno()]

    def news(self) -> None:
        if self._withdrawn:
            return
        for received in self._channel.receive_ready():
            match received.message:
                case messages.WorkerStarted(rank, pid):
                    self._ranks[pid] = rank
                case messages.ForkFailed(rank, number):
                    self._not_forked[rank] = number
                case messages.WorkerExited(rank, code):
                    self._codes[rank] = code
                case _:
                    self._channel.refuse(received)
        self._lost = self._channel.is_ended

    def exit_codes(self) -> Mapping[int, int]:
        return self._codes

    def signal(self, number: int, ranks: Collection[int]) -> None:
        if number == signal.SIGKILL and len(ranks) == len(self._requested) and not self._ranks:
            self._withdraw()
        elif ranks:
            self._channel.try_send(messages.SignalRanks(int(number), tuple(ranks)))

    def kill(self) -> None:
        """Have the supervisor kill all; where it has gone, do it here: nobody has reaped its children's numbers yet."""
        if not self._ranks and not self._lost:
            return self._withdraw()
        self._channel.try_send(messages.KillGroup())
        if self._lost:
            left = {pid: rank for pid, rank in self._ranks.items() if rank not in self._codes}
            kill_sessions(*left)
            self._codes.update(dict.fromkeys(left.values(), -int(signal.SIGKILL)))
        return None

    def lost(self) -> str | None:
        """The supervisor's end, where it has ended; a `LaunchError` is raised where no other one would do better."""
        if self._not_forked:
            self._end_forked()
            number, count = next(iter(self._not_forked.values())), len(self._requested)
            error = OSError(number, os.strerror(number))
            raise LaunchError(
                f"num_processes={count} was requested, but {limit_reached(error, count) or f'a fork failed: {error}'}"
            )
        if not self._lost:
            return None
        code, last = self._handle.ended(), self._handle.log()[-2000:].strip()
        if (why := self._handle.why_ended(BROKEN)) is not None:
            raise LaunchError(
                f"{len(self._requested)} worker{'s were' if len(self._requested) > 1 else ' was'} requested, and in the Python that they start "
                f"from ({sys.executable}) {why}. {limit_reached(ImportError(why), len(self._requested))} Mend the installation until `import torch` raises nothing there, and launch "
                "again."
            )
        return f"the supervisor (process {self._handle.pid}) ended with code {code}" + (f":\n{last}" if last else "")

    def _end_forked(self) -> None:
        """Kill those that could be forked, and wait for their ends: a launch that follows at once needs their room."""
        self.kill()
        deadline = time.monotonic() + _KILLED_WITHIN
        while not self._lost and len({*self._codes, *self._not_forked}) < len(self._requested):
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)
            self.news()

    def close(self) -> None:
        """Close the channel; the supervisor kills whatever is left."""
        if not self._channel.is_closed:
            self._channel.close()
            self._handle.release()

    def _withdraw(self) -> None:
        """Take back what the supervisor has not come to yet, which may be loading modules: it forks nothing for a closed channel."""
        self._withdrawn = True
        self._channel.shutdown()
        self._codes.update(dict.fromkeys(self._requested, -int(signal.SIGKILL)))


def supervised_workers(workers: Sequence[LocalWorker], idle_timeout: float | None = None) -> SupervisorWorkers:
    """Have the process's supervisor fork workers; one that turns out to have died is replaced once."""
    rank_info = workers[0].spec.rank_info
    run = f"{rank_info.run}/{rank_info.restart_count}/{rank_info.node_rank}"
    ranks = [worker.rank for worker in workers]
    log = ""
    for _ in range(2):
        handle = warm(idle_timeout)
        try:
            return SupervisorWorkers(handle, handle.fork(run, workers), ranks)
        except OSError:
            # it died between the check and the message
            handle.ended()
            log = handle.log()
    raise LaunchError(
        f"{rank_info.size} workers were requested, but the process that forks them does not start. It printed:\n"
        f"{log[-2000:]}\nTry start_method='spawn'."
    )


def supervisors() -> dict[str, dict[str, Any]]:
    """The processes that wait for launches, by number: who started them, and their proportional set size in MiB, where it is known."""
    found: dict[str, dict[str, Any]] = {}
    for process in psutil.process_iter():
        try:
            if not _is_supervisor(process) or _is_supervisor(process.parent()):
                continue
            memory: list[Any] = [process.memory_full_info()]
            for member in process.children(recursive=True):
                with contextlib.suppress(psutil.Error):  # it may end meanwhile
                    memory.append(member.memory_full_info())
            started_by = process.ppid()
        except psutil.Error:
            continue
        pss = round(sum(used.pss for used in memory) / (1 << 20), 1) if hasattr(memory[0], "pss") else None
        found[str(process.pid)] = {"started_by": started_by, "processes": len(memory), "pss_mib": pss}
    return found


def _is_supervisor(process: Any) -> bool:
    """Whether a process runs the supervisor's module, or was forked by one that does."""
    return process is not None and "accelerate_nb.supervisor.main" in process.cmdline()
