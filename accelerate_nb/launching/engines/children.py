"""Worker processes as children of this process, forked from it or started anew; and what workers of every engine are."""

import contextlib
import os
import re
import signal
import subprocess
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, TypeAlias

from accelerate_nb.transport.channel import frame
from accelerate_nb.transport.messages import BeginWorker
from accelerate_nb.transport.payload import Payload
from accelerate_nb.transport.worker_spec import LocalWorker, python_command, python_path
from accelerate_nb.worker import stdio
from accelerate_nb.worker.main import work
from accelerate_nb.worker.process_session import kill_sessions


class Workers(Protocol):
    """Processes that an engine started, one a rank. No method waits."""

    def exit_descriptors(self) -> Sequence[int]:
        """Descriptors that become readable when there is news."""

    def news(self) -> None:
        """Take in what has happened."""

    def exit_codes(self) -> Mapping[int, int]:
        """The ranks whose processes have ended, with their exit codes; negative: the signal that ended it."""

    def signal(self, number: int, ranks: Collection[int]) -> None:
        """Send a signal, once, to the process of each of these ranks that still runs."""

    def kill(self) -> None:
        """SIGKILL for every worker and all that it started."""

    def lost(self) -> str | None:
        """The reason why the workers can't be observed any more, or `None`; raises a `LaunchError` where none can be started."""

    def close(self) -> None:
        """Give back what this process holds of them; they have ended."""


# A way to place workers on this machine: it starts a process for each, and returns before they run.
Engine: TypeAlias = Callable[[Sequence[LocalWorker]], Workers]


class ChildProcesses:
    """Watches and ends children; `ranks` has the rank of each by its process number."""

    def __init__(self, ranks: Mapping[int, int]) -> None:
        self._running = dict(ranks)
        self._codes: dict[int, int] = {}
        self._watches: dict[int, int] = {}
        for pid in ranks:
            # not Linux, or an old one: it is polled every tenth of a second instead
            with contextlib.suppress(AttributeError, OSError):
                self._watches[pid] = os.pidfd_open(pid)

    def exit_descriptors(self) -> Sequence[int]:
        return [watch for pid, watch in self._watches.items() if pid in self._running]

    def news(self) -> None:
        ended: dict[int, int] = {}
        for pid in self._running:
            try:
                found, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                # somebody else in this process waits for all children; how it ended is not known
                ended[pid] = 0
            else:
                if found:
                    ended[pid] = os.waitstatus_to_exitcode(status)
        kill_sessions(*ended)
        for pid, code in ended.items():
            self._codes[self._running.pop(pid)] = code

    def exit_codes(self) -> Mapping[int, int]:
        return self._codes

    def signal(self, number: int, ranks: Collection[int]) -> None:
        for pid, rank in self._running.items():
            if rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def kill(self) -> None:
        """Kill the session of all that run, and the process itself where it has not made its session yet."""
        kill_sessions(*self._running)
        self.signal(signal.SIGKILL, self._running.values())

    def lost(self) -> str | None:
        """Children can always be observed."""
        return None

    def close(self) -> None:
        for watch in self._watches.values():
            os.close(watch)
        self._watches.clear()


def fork_workers(payload: Payload, workers: Sequence[LocalWorker]) -> ChildProcesses:
    """Fork a process for each worker: they inherit everything, so nothing has to travel."""
    # what is buffered here would be written by every child as well
    stdio.flush()
    parent, ranks = os.getpid(), {}
    # Python 3.12 warns of forking a process with threads; it was requested, and the child takes none of their locks. The filter
    # stays, since `catch_warnings` would end that of another thread.
    warnings.filterwarnings("ignore", r".*use of fork\(\)", DeprecationWarning, re.escape(__name__))
    for worker in workers:
        if (pid := os.fork()) == 0:
            work(worker, parent, payload)
        ranks[pid] = worker.rank
    return ChildProcesses(ranks)


def spawn_workers(workers: Sequence[LocalWorker]) -> ChildProcesses:
    """Start a new interpreter for each worker; nothing of this process is in them."""
    ranks = {}
    for worker in workers:
        reader, writer = os.pipe()
        spec, descriptors = worker.spec, worker.descriptors.all()
        environ = {**spec.process_environment.environ, **spec.rank_info.environ()}
        environ["PYTHONPATH"] = python_path()
        with os.fdopen(writer, "wb") as file:
            process = subprocess.Popen(
                [*python_command("accelerate_nb.worker.main"), str(reader)],
                stdin=subprocess.DEVNULL,
                pass_fds=[reader, *descriptors],
                start_new_session=True,
                env=environ,
            )
            os.close(reader)
            file.write(frame(BeginWorker(worker), len(descriptors)))
        # the process is waited for by its number, and Popen must not do it too when it is collected
        process.returncode = 0
        ranks[process.pid] = worker.rank
    return ChildProcesses(ranks)
