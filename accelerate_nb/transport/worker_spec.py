"""A worker before it starts, in plain values: its place among the ranks, its spec, and the descriptors that it inherits on its node."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import process
from typing import NamedTuple

LOOPBACK = "127.0.0.1"
# The variables by which gloo, NCCL and TensorPipe choose an interface.
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


class NetworkAddress(NamedTuple):
    """A host, by its address, and a port of it; that of a run's store, at which the ranks find each other, is its `master`."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class RankInfo:
    """A worker's rank among `size` on `nodes` machines, its place on its own, and the store of their rendezvous."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    master: NetworkAddress
    run: str
    node_rank: int = 0
    nodes: int = 1
    restart_count: int = 0
    max_restarts: int = 0

    def environ(self) -> dict[str, str]:
        """The variables that torchrun sets for a worker."""
        # TORCHELASTIC_USE_AGENT_STORE has every rank's "env://" join the store that is there already (`torch.distributed.rendezvous`)
        rank, size = str(self.rank), str(self.size)
        return {
            "RANK": rank,
            "LOCAL_RANK": str(self.local_rank),
            "ROLE_RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "ROLE_WORLD_SIZE": size,
            "ROLE_NAME": "default",
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.nodes),
            "MASTER_ADDR": self.master.host,
            "MASTER_PORT": str(self.master.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": self.run,
            "TORCHELASTIC_RESTART_COUNT": str(self.restart_count),
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
        }


def on_interface(name: str = LOOPBACK_INTERFACE) -> dict[str, str]:
    """The variables that have collectives go through one network interface, by default through none that leaves the machine."""
    return dict.fromkeys(INTERFACE_VARIABLES, name)


@dataclass(frozen=True, slots=True)
class ProcessEnvironment:
    """The state of the launching process that its workers take over."""

    environ: Mapping[str, str]
    folder: str
    path: tuple[str, ...]
    argv: tuple[str, ...]
    authkey: str
    threads: int | None
    # the most files that may be open, the mask of new files' modes, and the cores that may be used, where the system names them
    open_files: int | None = None
    umask: int | None = None
    cores: tuple[int, ...] = ()

    def take_over(self) -> None:
        os.environ.clear()
        os.environ.update(self.environ)
        if os.path.isdir(self.folder):
            os.chdir(self.folder)
        sys.path[:] = self.path
        sys.argv[:] = self.argv
        # proxies of a multiprocessing.Manager prove themselves with it
        process.current_process().authkey = bytes.fromhex(self.authkey)
        if self.open_files is not None:
            # one that an administrator has lowered meanwhile is no reason to fail
            with suppress(ValueError, OSError):
                resource.setrlimit(
                    resource.RLIMIT_NOFILE, (self.open_files, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
                )
        if self.umask is not None:
            os.umask(self.umask)
        if self.cores:
            with suppress(OSError):
                os.sched_setaffinity(0, self.cores)

    def on_node(self, node: ProcessEnvironment) -> ProcessEnvironment:
        """The same on another machine, whose own environment is `node`: its variables and modules stay, and these come on top."""
        return replace(
            self,
            environ={**node.environ, **self.environ},
            folder=self.folder if os.path.isdir(self.folder) else node.folder,
            path=tuple(dict.fromkeys((*node.path, *(entry for entry in self.path if os.path.exists(entry))))),
            threads=self.threads or node.threads,
            open_files=node.open_files,
            umask=node.umask,
            cores=node.cores,
        )


def current_environment(more: Mapping[str, str], threads: int | None) -> ProcessEnvironment:
    """The state of this process, with `more` in the environment, which wins over variables of the same names."""
    return ProcessEnvironment(
        environ={**os.environ, **more},
        folder=current_folder(),
        path=tuple(filter(_is_text, sys.path)),
        argv=tuple(map(str, sys.argv)),
        authkey=bytes(process.current_process().authkey).hex(),
        threads=threads,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        umask=_umask(),
        cores=tuple(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (),
    )


def current_folder() -> str:
    """The folder that this process is in; empty where it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def _umask() -> int | None:
    """The mask of new files' modes, read without a moment in which it is another; `None` where the system doesn't say."""
    with suppress(OSError), open("/proc/self/status", encoding="utf-8") as status:
        return next((int(line.split()[1], 8) for line in status if line.startswith("Umask:")), None)
    return None


def _is_text(entry: object) -> bool:
    """Whether an entry of `sys.path` counts: Python's own import leaves out what is no text, such as a `Path`."""
    return isinstance(entry, str)


def python_command(module: str) -> list[str]:
    """The command of a new Python that runs a module, with Python's own modules even where the current folder has some of their names."""
    # Python 3.10 always looks into the current folder first
    return [sys.executable, *(["-P"] if sys.version_info >= (3, 11) else []), "-m", module]


def python_path() -> str:
    """This process's `sys.path`, as PYTHONPATH of a new Python."""
    return os.pathsep.join(entry for entry in sys.path if _is_text(entry) and entry)


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """All that a worker needs to begin, as values that mean the same on every machine; a forked one inherits its payload."""

    rank_info: RankInfo
    process_environment: ProcessEnvironment
    # what ranks compute on, in torch's word ("cpu", "cuda", "xla"): the environment alone does not show it, since a launch on the
    # CPU may be requested where it names TPUs
    kind: str = "cpu"
    is_result_wanted: bool = True


# The descriptors of a worker of which there is one each, in the order in which they travel.
_FIXED = ("stdout", "stderr", "events", "outcome", "stacks", "payload", "store")


@dataclass(frozen=True, slots=True)
class WorkerDescriptors:
    """A worker's ends of what connects it with its node's agent, and the files it needs; `store` is the listening socket, for rank 0."""

    stdout: int
    stderr: int
    events: int
    outcome: int
    stacks: int
    payload: int = -1
    store: int = -1
    more: tuple[int, ...] = ()

    def all(self) -> tuple[int, ...]:
        return (*(number for name in _FIXED if (number := getattr(self, name)) >= 0), *self.more)


@dataclass(frozen=True, slots=True)
class LocalWorker:
    """A worker on its node: its spec, and the numbers of the descriptors that it inherits there."""

    spec: WorkerSpec
    descriptors: WorkerDescriptors

    @property
    def rank(self) -> int:
        return self.spec.rank_info.rank

    def with_descriptors(self, received: Iterable[int]) -> LocalWorker:
        """The worker with the numbers that its descriptors have in this process; they come in the order of `WorkerDescriptors.all()`."""
        rest = list(received)
        fixed = {name: rest.pop(0) if getattr(self.descriptors, name) >= 0 else -1 for name in _FIXED}
        return replace(self, descriptors=WorkerDescriptors(**fixed, more=tuple(rest)))
