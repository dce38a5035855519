"""The spec of a worker before it starts, which is plain values, and the descriptors that it inherits on its node."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from multiprocessing import process

from accelerate_nb.transport.rank_info import RankInfo


@dataclass(frozen=True, slots=True)
class ProcessEnvironment:
    """The state of the launching process that its workers take over."""

    environ: Mapping[str, str]
    folder: str
    path: tuple[str, ...]
    argv: tuple[str, ...]
    authkey: str
    threads: int | None

    def take_over(self) -> None:
        """Give this process the same environment."""
        os.environ.clear()
        os.environ.update(self.environ)
        if os.path.isdir(self.folder):
            os.chdir(self.folder)
        sys.path[:] = self.path
        sys.argv[:] = self.argv
        # proxies of a multiprocessing.Manager prove themselves with it
        process.current_process().authkey = bytes.fromhex(self.authkey)

    def on_node(self, node: ProcessEnvironment) -> ProcessEnvironment:
        """
        The same on another machine, whose own environment is `node`: its variables and modules stay, and these come on top.

        A folder of this machine is taken where the other one has it, too. Without a number of threads, the node's is taken.
        """
        return replace(
            self,
            environ={**node.environ, **self.environ},
            folder=self.folder if os.path.isdir(self.folder) else node.folder,
            path=tuple(dict.fromkeys((*node.path, *(entry for entry in self.path if os.path.exists(entry))))),
            threads=self.threads or node.threads,
        )


def current_environment(more: Mapping[str, str], threads: int | None) -> ProcessEnvironment:
    """The state of this process, with `more` in the environment, which wins over variables of the same names."""
    return ProcessEnvironment(
        environ={**os.environ, **more},
        folder=os.getcwd(),
        path=tuple(sys.path),
        argv=tuple(sys.argv),
        authkey=bytes(process.current_process().authkey).hex(),
        threads=threads,
    )


@dataclass(frozen=True, slots=True)
class PayloadReference:
    """A payload without its content: the bytes of its memory file, and how many of multiprocessing's descriptors it needs."""

    size: int
    handles: int = 0


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """All that a worker needs to begin, as values that mean the same on every machine; a forked one inherits its payload."""

    rank_info: RankInfo
    process_environment: ProcessEnvironment
    payload: PayloadReference | None = None
    # what ranks compute on, in torch's word ("cpu", "cuda", "xla"): the environment alone does not show it, since a launch on the
    # CPU may be requested where it names TPUs
    kind: str = "cpu"
    is_result_wanted: bool = True


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
        """Every descriptor that is there."""
        fixed = (self.stdout, self.stderr, self.events, self.outcome, self.stacks, self.payload, self.store)
        return (*(descriptor for descriptor in fixed if descriptor >= 0), *self.more)


@dataclass(frozen=True, slots=True)
class LocalWorker:
    """A worker on its node: its spec, and the numbers of the descriptors that it inherits there."""

    spec: WorkerSpec
    descriptors: WorkerDescriptors

    @property
    def rank(self) -> int:
        """Its rank."""
        return self.spec.rank_info.rank

    def arrived(self, descriptors: Iterable[int]) -> LocalWorker:
        """The worker where its descriptors have arrived, under other numbers, in the order of `WorkerDescriptors.all()`."""
        return replace(self, descriptors=numbered(self.descriptors, descriptors))


def numbered(descriptors: WorkerDescriptors, arrived: Iterable[int]) -> WorkerDescriptors:
    """The descriptors under their numbers in this process; they arrive in the order of `WorkerDescriptors.all()`."""
    rest = list(arrived)
    fixed = {
        name: rest.pop(0) if getattr(descriptors, name) >= 0 else -1
        for name in ("stdout", "stderr", "events", "outcome", "stacks", "payload", "store")
    }
    return WorkerDescriptors(**fixed, more=tuple(rest))
