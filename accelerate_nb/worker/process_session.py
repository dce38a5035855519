"""Sessions of processes: a worker and all that it started are one, and end as one."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from pathlib import Path

_SET_PDEATHSIG = 1  # PR_SET_PDEATHSIG of linux/prctl.h
_PROC = Path("/proc")


def die_with_parent(parent: int, by: int = signal.SIGKILL) -> None:
    """Have Linux signal this process when the thread that made it ends (prctl(2)), or end it without `parent`."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, int(by), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def tie_children() -> None:
    """Have what this process forks (a data loader's workers) end with it, whatever ends it: nobody may be left to do it."""
    if sys.platform != "linux":
        return
    # looked up now: between a fork and an exec, the loader's lock may be held by a thread that is not there any more
    prctl = ctypes.CDLL(None).prctl
    lasting = False

    def before() -> None:
        # the signal comes when the forking thread ends, and only the main one lasts as long as the process
        nonlocal lasting
        lasting = threading.current_thread() is threading.main_thread()

    def in_child() -> None:
        if lasting:
            prctl(_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)

    os.register_at_fork(before=before, after_in_child=in_child)


def kill_sessions(*leaders: int) -> None:
    """SIGKILL for every process of the sessions that these lead or led, their data-loader workers included."""
    for leader in leaders:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
    for pid in members(*leaders):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def members(*leaders: int) -> list[int]:
    """The processes of sessions, by one look at /proc; without it the leaders alone."""
    if not leaders or not _PROC.is_dir():
        return list(leaders)
    wanted = set(leaders)
    return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit() and _session(entry) in wanted]


def _session(entry: Path) -> int | None:
    try:
        # proc(5): after the name in brackets come state, ppid, pgrp, session
        return int((entry / "stat").read_text().rpartition(")")[2].split()[3])
    except (OSError, IndexError, ValueError):
        # it ended meanwhile
        return None
