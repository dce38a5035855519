"""The system's limits on files, processes and memory, and what a run needs of them."""

import contextlib
import errno
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil

from accelerate_nb.errors import LaunchError
from accelerate_nb.failures.exception_copy import message_of

_MIB = 1 << 20
# What a rank has: files of the launching process while it starts; a process, and threads of it once it has a group; memory at the least.
_FILES_OF_A_RANK, _THREADS_OF_A_RANK, _MEMORY_OF_A_RANK = 10, 5, 8 * _MIB
# What the launch itself has: its pipes and its logs; its supervisor and its threads.
_OWN_FILES, _OWN_THREADS = 16, 4
# What a system's limit of files may be raised to everywhere, and what it says when it is reached.
_USUAL_FILES, _NO_MORE_FILES = 65535, frozenset({errno.EMFILE, errno.ENFILE})
# With so many processes more than a launch needs, it does not count those that there are: that takes longer than a warm launch.
_UNCOUNTED = 1024
# The address space that importing torch takes, without a GPU, and that of a worker that trains.
_LEAST_ADDRESS_SPACE, _USUAL_ADDRESS_SPACE = 768 * _MIB, 4096 * _MIB


@dataclass(frozen=True, slots=True)
class ProcessLimit:
    """A limit, how much of it is used already, and how it is raised."""

    what: str
    limit: int
    used: int
    remedy: str

    def is_short_of(self, needed: int) -> bool:
        return self.limit - self.used < needed


def check_limits(ranks: int) -> None:
    """Raise a `LaunchError` where so many ranks can't run on this machine, whatever they do."""
    memory = psutil.virtual_memory()
    remedy = "Launch fewer processes, or on a machine with more memory."
    left = ProcessLimit("bytes of memory on this machine", memory.total, memory.total - memory.available, remedy)
    needs = _needs(ranks, _THREADS_OF_A_RANK * ranks + _UNCOUNTED) | {"memory": (left, _MEMORY_OF_A_RANK * ranks)}
    for limit, needed in needs.values():
        if limit is not None and limit.is_short_of(needed):
            raise LaunchError(f"num_processes={ranks} was requested, but {_sentence(limit, ranks, needed)}")


def limit_reached(error: BaseException, ranks: int) -> str:
    """The sentence on the limit that an error comes from; empty where it comes from none."""
    text = f"{type(error).__name__}: {message_of(error)}"
    number = getattr(error, "errno", None)
    if number in _NO_MORE_FILES or "Too many open files" in text:
        resource = "files"
    elif re.search(r"Resource temporarily unavailable|can't start new thread|pthread_create", text):
        resource = "processes"
    elif number == errno.ENOMEM or re.search(
        r"^MemoryError|failed to map segment|cannot allocate memory", text, re.IGNORECASE
    ):
        resource = "address space"
    else:
        return ""
    limit, needed = _needs(ranks)[resource]
    if resource == "address space":
        needed = _USUAL_ADDRESS_SPACE
    # another cause has the same words
    return "" if limit is None or not limit.is_short_of(needed) else _sentence(limit, ranks, needed)


def _needs(ranks: int, most_uncounted: float = math.inf) -> dict[str, tuple[ProcessLimit | None, int]]:
    """The limits by resource, each with what ranks need of it; processes are counted where the limit is below `most_uncounted`."""
    files, space = _FILES_OF_A_RANK * ranks + _OWN_FILES, soft_limit("RLIMIT_AS")
    remedy = "Raise it (`ulimit -v unlimited`) before the notebook server or the launch starts."
    address_space = None if space is None else ProcessLimit("bytes of a process's address space", space, 0, remedy)
    return {
        "files": (_file_limit(files), files),
        "processes": (_process_limit(most_uncounted), _THREADS_OF_A_RANK * ranks + _OWN_THREADS),
        "address space": (address_space, _LEAST_ADDRESS_SPACE),
    }


def _sentence(limit: ProcessLimit, ranks: int, needed: int) -> str:
    run = f"a run of {ranks} rank{'' if ranks == 1 else 's'}"
    if "bytes" in limit.what:
        found = f"{limit.limit / _MIB:,.0f} MiB is the limit of {limit.what}"
        used = f", of which {limit.used / _MIB:,.0f} MiB are used" if limit.used else ""
        return f"{found}{used}; {run} needs about {needed / _MIB:,.0f} MiB. {limit.remedy}"
    return f"{limit.limit} is the limit of {limit.what}, of which {limit.used} are used; {run} needs about {needed}. {limit.remedy}"


def _file_limit(needed: int) -> ProcessLimit | None:
    limit = soft_limit("RLIMIT_NOFILE")
    if limit is None:
        return None
    try:
        used = len(os.listdir("/dev/fd"))
    except OSError as error:
        # to list them takes a file, too
        used = limit if error.errno in _NO_MORE_FILES else 0
    raised = f"Raise it (`ulimit -n {_USUAL_FILES}`) before the notebook server or the launch starts, or launch"
    remedy = f"{raised if needed < _USUAL_FILES else 'Launch'} fewer processes."
    return ProcessLimit("files that a process may have open", limit, used, remedy)


def _process_limit(most_uncounted: float) -> ProcessLimit | None:
    """The nearest of the limits on processes and threads: the user's, and that of each control group."""
    found = []
    limit = soft_limit("RLIMIT_NPROC")
    if limit is not None and os.getuid() != 0:
        remedy = (
            "Raise it (`ulimit -u 4096`) before the notebook server or the launch starts, or launch fewer processes."
        )
        used = 0
        for process in psutil.process_iter() if limit < most_uncounted else ():
            with contextlib.suppress(psutil.Error):
                used += process.num_threads() if process.uids().real == os.getuid() else 0
        found.append(ProcessLimit("processes and threads of this user", limit, used, remedy))
    remedy = "Raise the container's limit of pids (`docker run --pids-limit`, `pids.max`), or launch fewer processes."
    for group in _control_groups():
        with contextlib.suppress(OSError, ValueError):
            limit, used = int((group / "pids.max").read_text()), int((group / "pids.current").read_text())
            found.append(ProcessLimit("processes and threads in this container", limit, used, remedy))
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/proc/sys/kernel/pid_max").read_text())
        found.append(ProcessLimit("processes on this machine (kernel.pid_max)", limit, 0, "Launch fewer processes."))
    return min(found, key=lambda item: item.limit - item.used, default=None)


def soft_limit(name: str) -> int | None:
    """A limit of this process by its name in `resource`; `None` where there is none."""
    if find_spec("resource") is None:
        return None
    import resource

    if not hasattr(resource, name):
        return None
    limit = resource.getrlimit(getattr(resource, name))[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _control_groups() -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and "pids" not in controllers.split(","):
                continue
            root = Path("/sys/fs/cgroup", *(["pids"] if controllers else []))
            folder = root / name.lstrip("/")
            yield from (folder, *(parent for parent in folder.parents if root in (parent, *parent.parents)))
