"""How busy this machine and the ranks' devices are."""

import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from accelerate_nb.devices.cpu import CGROUPS, MEMBERSHIP, bound, cgroup_quota, control_groups, cores, groups_of
from accelerate_nb.events.event_types import DeviceSample, HostSample


@dataclass(frozen=True, slots=True)
class RankProcesses:
    """`size` ranks, and the processes of those that run. `memory` is all that there is, in bytes."""

    size: int
    pids: Mapping[int, int]
    memory: int


class DeviceGauge:
    """Reports the load of a kind of devices, of this one none; nothing waits long for it, and the query wakes nothing."""

    def samples(self, ranks: RankProcesses, now: float) -> Iterable[DeviceSample]:
        """The load of these ranks' devices; a rank whose device does not report it is left out."""
        return ()

    def close(self) -> None:
        """End the queries."""


_SHARED = Path("/dev/shm")
_PROC = Path("/proc")


class HostGauge:
    """The machine, or the container where a control group sets a limit; of the disks of `folders` the fullest is shown."""

    def __init__(self, folders: Sequence[Path], cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> None:
        self._folders, self._cgroups, self._membership = folders, cgroups, membership
        self._quota = cgroup_quota(cgroups, membership)
        if self._quota is not None and self._quota >= len(bound()):
            self._quota = None
        self._before = self._busy()

    def sample(self) -> HostSample:
        """The current load, its cores since the last sample."""
        before, self._before = self._before, self._busy()
        used, possible = (now - then for now, then in zip(self._before, before, strict=True))
        disks = [disk for folder in self._folders if (disk := _disk(folder)) is not None]
        return HostSample(
            cpu=min(100.0, max(0.0, 100.0 * used / possible)) if possible > 0 else 0.0,
            memory=self.memory(),
            disk=max(disks, key=lambda disk: disk[0] / max(disk[1], 1), default=None),
            shared_memory=_disk(_SHARED),
            time=time.time(),
        )

    def memory(self) -> tuple[int, int]:
        """The used and the total memory, in bytes; what can be given back at once (caches of files) is not used."""
        seen = psutil.virtual_memory()
        machine = (seen.total - seen.available, seen.total)
        limited = (_memory(folder) for folder in control_groups("memory", self._cgroups, self._membership))
        # a limit above the machine's own memory is none
        below = (item for item in limited if item is not None and item[1] < seen.total)
        return min(below, key=lambda memory: memory[1] - memory[0], default=machine)

    def _busy(self) -> tuple[float, float]:
        """So many seconds were computed so far, and so many could have been."""
        if self._quota is not None and (used := _cpu_seconds(self._cgroups, self._membership)) is not None:
            return used, time.monotonic() * self._quota
        every = psutil.cpu_times(percpu=True)
        # a guest's time is in the user's already, and what another guest of the host took was not ours to use
        bound_cores = [every[core]._asdict() for core in bound() if core < len(every)]
        total = sum(sum(item.values()) - item.get("guest", 0) - item.get("guest_nice", 0) for item in bound_cores)
        idle = sum(item["idle"] + item.get("iowait", 0) + item.get("steal", 0) for item in bound_cores)
        return total - idle, total


class WorkerGauge(DeviceGauge):
    """The processes of ranks that compute on the CPU; of each of `size` ranks an equal share of the cores is its own."""

    def __init__(self, size: int) -> None:
        self._share = max(1.0, cores() / size)
        self._before: Mapping[int, float] = {}
        self._at = time.monotonic()

    def samples(self, ranks: RankProcesses, now: float) -> list[DeviceSample]:
        """Each rank's load since the last sample, its children's too, in percent of its share; shared pages are counted once."""
        at = time.monotonic()
        passed, self._at = at - self._at, at
        found = usage(set(ranks.pids.values()))
        samples = []
        for rank, pid in ranks.pids.items():
            if not (processes := found[pid]):
                continue
            known = [item.seconds - self._before[item.pid] for item in processes if item.pid in self._before]
            busy = 100.0 * sum(known) / (passed * self._share) if known and passed > 0 else None
            utilisation = None if busy is None else min(100.0, max(0.0, busy))
            memory_used = sum(item.memory for item in processes)
            samples.append(DeviceSample(rank, "cpu", utilisation, memory_used, ranks.memory, now))
        self._before = {entry.pid: entry.seconds for item in found.values() for entry in item}
        return samples


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """A process: the seconds that it has computed, and its memory in bytes, of a child without what it shares."""

    pid: int
    seconds: float
    memory: int


def usage(leaders: Iterable[int]) -> dict[int, list[ProcessUsage]]:
    """The usage of each of these processes, with what it started: itself first, nothing where it has ended."""
    found: dict[int, list[ProcessUsage]] = {pid: [] for pid in leaders}
    if not (_PROC / "self" / "stat").exists():
        return {pid: _from_psutil(pid) for pid in found}
    # by one read of each process of the machine: a worker leads a session, and what it starts is in there
    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    for entry in os.scandir(_PROC):
        if not entry.name.isdecimal():
            continue
        pid, folder = int(entry.name), _PROC / entry.name
        # one that has just ended is left out
        with suppress(OSError):
            # the name of a process may hold spaces and parentheses
            facts = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            # numbered as in proc(5), from the third on: 4 parent, 6 session, 14 and 15 time, 24 memory
            leader = pid if pid in found else int(facts[3])
            if leader in found:
                shared = 0 if pid == leader else int((folder / "statm").read_text().split()[2])
                seconds = (int(facts[11]) + int(facts[12])) / ticks
                found[leader].append(ProcessUsage(pid, seconds, max(0, int(facts[21]) - shared) * page))
    return found


def _from_psutil(pid: int) -> list[ProcessUsage]:
    found = []
    try:
        leader = psutil.Process(pid)
        for process in (leader, *leader.children(recursive=True)):
            times = process.cpu_times()
            found.append(ProcessUsage(process.pid, times.user + times.system, process.memory_info().rss))
    except psutil.Error:
        return []
    return found


def _disk(folder: Path) -> tuple[int, int] | None:
    try:
        disk = shutil.disk_usage(folder)
    except OSError:
        return None
    # what is kept for the administrator is neither used nor there for others
    return disk.used, disk.used + disk.free


def _memory(folder: Path) -> tuple[int, int] | None:
    """The memory that a control group uses, and may use; `None` where it has no limit."""
    for limit, current, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        # of the other version, or "max"
        with suppress(OSError, ValueError):
            total, used = int((folder / limit).read_text()), int((folder / current).read_text())
            return max(0, used - _fact(folder / "memory.stat", cache)), total
    return None


def _cpu_seconds(cgroups: Path, membership: Path) -> float | None:
    """The CPU seconds of all processes of this one's control group."""
    groups = groups_of(membership)
    with suppress(OSError):
        return _fact(cgroups / groups.get("", "/").lstrip("/") / "cpu.stat", "usage_usec") / 1e6
    for controller in ("cpuacct", "cpu"):
        folder = cgroups / controller / groups.get(controller, "/").lstrip("/")
        with suppress(OSError, ValueError):
            return int((folder / "cpuacct.usage").read_text()) / 1e9
    return None


def _fact(file: Path, name: str) -> int:
    lines = (line.split() for line in file.read_text().splitlines())
    return next((int(line[1]) for line in lines if line and line[0] == name), 0)
