"""The CPU's cores that this process may use, and the control groups that limit it."""

import os
from contextlib import suppress
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
    """The number of cores that this process's control groups allow; `None` is no limit."""
    quotas = []
    for folder in control_groups("cpu", cgroups, membership):
        # version 2, then version 1
        with suppress(OSError, ValueError):
            allowed, period = (folder / "cpu.max").read_text(encoding="ascii").split()
            quotas.append(int(allowed) / int(period))
        with suppress(OSError, ValueError):
            allowed, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            quotas.append(int(allowed) / int(period))
    # "max" is no number, and -1 no limit
    return min((quota for quota in quotas if quota >= 0), default=None)


def control_groups(controller: str, cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> list[Path]:
    """The folders of this process's control group and of all above it that may limit a resource, in either version of them."""
    groups, found = groups_of(membership), []
    for folder, group in ((cgroups, ""), (cgroups / controller, controller)):
        # a container may see its own group as the root
        path = PurePosixPath(groups.get(group, "/").lstrip("/"))
        found += [folder / path, *(folder / parent for parent in path.parents)]
    return found


def groups_of(membership: Path) -> dict[str, str]:
    """The process's group for each controller; version 2 has one group for all, under the empty name."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    entries = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    return {name: path for _, names, path in entries for name in names.split(",")}
