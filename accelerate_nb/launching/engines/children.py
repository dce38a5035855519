"""Workers that are this process's own children."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Mapping, Sequence

from accelerate_nb.worker.process_session import kill_sessions


class ChildProcesses:
    """Watches and ends children by their process numbers; each has one rank, or several as threads."""

    def __init__(self, ranks: Mapping[int, Sequence[int]]) -> None:
        self._running = dict(ranks)
        self._codes: dict[int, int] = {}
        self._watches = {pid: _watch(pid) for pid in ranks}

    def exit_descriptors(self) -> Sequence[int]:
        """A descriptor for each process, where the system has them (`pidfd_open`)."""
        return [watch for pid, watch in self._watches.items() if watch is not None and pid in self._running]

    def news(self) -> None:
        """Collect those that have ended, and end what they left behind."""
        ended = {pid: code for pid in self._running if (code := _ended(pid)) is not None}
        kill_sessions(*ended)
        for pid, code in ended.items():
            self._codes.update(dict.fromkeys(self._running.pop(pid), code))

    def exit_codes(self) -> Mapping[int, int]:
        """Rank to exit code."""
        return self._codes

    def signal(self, number: int, ranks: Collection[int]) -> None:
        """Send a signal to those that run and have one of these ranks."""
        for pid, process_ranks in self._running.items():
            if not set(process_ranks).isdisjoint(ranks):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def kill(self) -> None:
        """Kill the session of all that run, and the process itself where it has not made its session yet."""
        kill_sessions(*self._running)
        for process_ranks in self._running.values():
            self.signal(signal.SIGKILL, process_ranks)

    def lost(self) -> str | None:
        """Children can always be observed."""
        return None

    def close(self) -> None:
        """Close the watches."""
        for watch in self._watches.values():
            if watch is not None:
                os.close(watch)
        self._watches.clear()


def _watch(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        # not Linux, or an old one: it is polled every tenth of a second instead
        return None


def _ended(pid: int) -> int | None:
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        # somebody else in this process waits for all children; how it ended is not known
        return 0
    return os.waitstatus_to_exitcode(status) if found else None
