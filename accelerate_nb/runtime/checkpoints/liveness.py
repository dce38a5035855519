"""The processes of a run that have died, as far as one of them can know."""

from __future__ import annotations

import json
import os
import sys
import threading
import weakref
from contextlib import suppress
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from accelerate_nb.rank import background_tasks
from accelerate_nb.runtime.world.world import World


class ProcessLiveness:
    """
    The processes of a run, each registered with its machine and its number there.

    A process that ended normally is no dead one: a main process may save alone when the others are through. Of those on other
    machines nothing is known; they are taken to be alive, and their launcher ends everybody when one of them dies.
    """

    def __init__(self, world: World, store: Any) -> None:
        self._world = world
        self._store = store
        self._known: dict[int, dict[str, Any]] = {}
        pid = os.getpid()
        # ranks that talk through their hosts may be threads; a process has died when its main thread has, whose number is its own
        thread = pid if world.host_group is None else threading.get_native_id()
        self._liveness = {"machine": _machine(), "pid": pid, "thread": thread, "began": _began(pid, thread)}
        self._publish(self._liveness)
        report_end = partial(_report_end, weakref.ref(self))
        # the first is for a launched function; the second for scripts, and for children of multiprocessing, which have no atexit
        background_tasks.begun(report_end)
        Finalize(None, report_end, exitpriority=0)

    def is_dead(self, rank: int) -> bool:
        """Whether a process is known to have ended abnormally."""
        if rank not in self._known and (published := self._read(rank)):
            self._known[rank] = published
        entry = self._known.get(rank, {})
        if entry.get("machine") != _machine() or _is_alive(entry):
            return False
        return "ended" not in self._read(rank)

    def ended(self) -> None:
        """This process has reached its end; the others need not miss it."""
        # the process that holds the store may have gone before
        with suppress(RuntimeError):
            self._publish({**self._liveness, "ended": True})

    def _publish(self, entry: dict[str, Any]) -> None:
        self._store.set(f"alive/{self._world.rank}", json.dumps(entry))

    def _read(self, rank: int) -> dict[str, Any]:
        key = f"alive/{rank}"
        entry: dict[str, Any] = json.loads(self._store.get(key)) if self._store.check([key]) else {}
        return entry


def _report_end(reference: weakref.ref[ProcessLiveness]) -> None:
    liveness = reference()
    # whichever exception ends an interpreter is kept as its last; that which ends a child is being handled now
    if liveness is not None and sys.exc_info()[0] is None and getattr(sys, "last_value", None) is None:
        liveness.ended()


def _machine() -> str:
    """An identifier that two processes share if they know each other by the same process numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return f"{boot.strip()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return os.uname().nodename if hasattr(os, "uname") else ""


def _is_alive(entry: dict[str, Any]) -> bool:
    if entry["began"] is not None:
        return bool(_began(entry["pid"], entry["thread"]) == entry["began"])
    if os.name == "nt":
        return True  # a signal would end it there
    try:
        os.kill(entry["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _began(pid: int, thread: int) -> str | None:
    """The start time of a thread, for numbers that are used again; `None` if it is gone, or not on Linux."""
    try:
        fields = Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # proc(5): the state is the first field after the name, and the start time the twentieth; a zombie has died
    return None if fields[0] in "ZX" else fields[19]
