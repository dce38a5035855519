"""The spec of a worker before it starts: plain values, and the numbers of the descriptors that it inherits."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from multiprocessing import process
from typing import Any

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
class WorkerDescriptors:
    """A worker's ends of what connects it with the kernel, and the files it needs; `store` is the listening socket, for rank 0."""

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
class WorkerSpec:
    """All that a worker needs to begin."""

    rank_info: RankInfo
    process_environment: ProcessEnvironment
    descriptors: WorkerDescriptors
    # whether torch_xla's runtime is to wake before the function is there; the environment alone does not show that
    # it is wanted, since a launch on the CPU may be requested where it names TPUs
    through_xla: bool = False

    def at(self, descriptors: WorkerDescriptors) -> WorkerSpec:
        """The same for a process in which the descriptors have other numbers."""
        return replace(self, descriptors=descriptors)

    def to_json(self) -> str:
        """The spec as one line."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> WorkerSpec:
        """The spec that `to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        around, held = values["process_environment"], values["descriptors"]
        around |= {"path": tuple(around["path"]), "argv": tuple(around["argv"])}
        return WorkerSpec(
            rank_info=RankInfo(**values["rank_info"]),
            process_environment=ProcessEnvironment(**around),
            descriptors=WorkerDescriptors(**{**held, "more": tuple(held["more"])}),
            through_xla=values["through_xla"],
        )


def numbered(descriptors: WorkerDescriptors, arrived: Iterable[int]) -> WorkerDescriptors:
    """The descriptors under their numbers in this process; they arrive in the order of `WorkerDescriptors.all()`."""
    rest = list(arrived)
    fixed = {
        name: rest.pop(0) if getattr(descriptors, name) >= 0 else -1
        for name in ("stdout", "stderr", "events", "outcome", "stacks", "payload", "store")
    }
    return WorkerDescriptors(**fixed, more=tuple(rest))


def as_text(specs: Sequence[WorkerSpec]) -> str:
    """The specs of one process, whose ranks are threads where there are several, in one line."""
    return f"[{', '.join(spec.to_json() for spec in specs)}]"


def of_text(text: str, arrived: Sequence[int] | None = None) -> list[WorkerSpec]:
    """The specs that `as_text` wrote; where descriptors have `arrived` under other numbers, in the order of the specs, with these."""
    specs = [WorkerSpec.from_json(json.dumps(fields)) for fields in json.loads(text)]
    if arrived is None:
        return specs
    rest = iter(arrived)
    return [spec.at(numbered(spec.descriptors, islice(rest, len(spec.descriptors.all())))) for spec in specs]
