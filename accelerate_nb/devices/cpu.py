"""The CPU's cores that this process may use."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def bound() -> tuple[int, ...]:
    """The cores that this process is bound to, by number; all of them where it is bound to none."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def cores() -> int:
    """The number of cores that this process may keep busy: those it is bound to, or fewer under a container's quota."""
    quota = cgroup_quota(CGROUPS, MEMBERSHIP)
    count = len(bound())
    return count if quota is None else max(1, min(count, int(quota)))


def cgroup_quota(cgroups: Path, membership: Path) -> float | None:
    """The number of cores that this process's control groups allow, in either version of them; `None` is no limit."""
    groups = groups_of(membership)
    quotas = [_quota_v2(cgroups / parent) for parent in with_parents(groups.get("", "/"))]
    quotas += [_quota_v1(cgroups / "cpu" / parent) for parent in with_parents(groups.get("cpu", "/"))]
    return min((quota for quota in quotas if quota is not None), default=None)


def groups_of(membership: Path) -> dict[str, str]:
    """The process's group for each controller; version 2 has one group for all, under the empty name."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    entries = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    return {name: path for _, names, path in entries for name in names.split(",")}


def with_parents(group: str) -> list[str]:
    """A group and all above it, relative to the root; a container may see its own group as the root."""
    path = PurePosixPath(group.lstrip("/"))
    return [str(path), *map(str, path.parents)] if path.parts else ["."]


def _quota_v2(folder: Path) -> float | None:
    try:
        allowed, period = (folder / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    return None if allowed == "max" else int(allowed) / int(period)


def _quota_v1(folder: Path) -> float | None:
    try:
        allowed = int((folder / "cpu.cfs_quota_us").read_text(encoding="ascii"))
        period = int((folder / "cpu.cfs_period_us").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return None if allowed < 0 else allowed / period
