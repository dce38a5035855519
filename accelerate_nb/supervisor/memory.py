"""The memory that supervisors hold, as the system counts it."""

from __future__ import annotations

from typing import Any

import psutil


def supervisors() -> dict[str, dict[str, Any]]:
    """
    The processes that wait for launches, by number: who started them, and the memory that they hold.

    `pss_mib` is their proportional set size: pages that several processes share are divided among them. It is `None` where
    the system does not report it.
    """
    found: dict[str, dict[str, Any]] = {}
    for process in psutil.process_iter():
        try:
            if not _is_supervisor(process) or _is_supervisor(process.parent()):
                continue
            family = [process, *process.children(recursive=True)]
            memory: list[Any] = [member.memory_full_info() for member in family]
            started_by = process.ppid()
        except psutil.Error:
            continue
        pss = round(sum(used.pss for used in memory) / (1 << 20), 1) if hasattr(memory[0], "pss") else None
        found[str(process.pid)] = {"started_by": started_by, "processes": len(family), "pss_mib": pss}
    return found


def _is_supervisor(process: Any) -> bool:
    """Whether a process runs the supervisor's module, or was forked by one that does."""
    return process is not None and "accelerate_nb.supervisor.main" in process.cmdline()
