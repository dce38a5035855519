"""What a worker is told before it starts: plain values, and the numbers of the descriptors that it inherits."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing import process
from typing import Any

from accelerate_nb.launching.seat import Seat


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The state of the launching process that its workers take over."""

    environ: Mapping[str, str]
    folder: str
    path: tuple[str, ...]
    argv: tuple[str, ...]
    authkey: str
    threads: int | None

    def take_over(self) -> None:
        """Make this process's surroundings the same."""
        os.environ.clear()
        os.environ.update(self.environ)
        if os.path.isdir(self.folder):
            os.chdir(self.folder)
        sys.path[:] = self.path
        sys.argv[:] = self.argv
        # proxies of a multiprocessing.Manager prove themselves with it
        process.current_process().authkey = bytes.fromhex(self.authkey)


def surroundings_here(more: Mapping[str, str], threads: int | None) -> Surroundings:
    """This process's surroundings, with `more` in the environment; what is there already wins over nothing of `more`."""
    return Surroundings(
        environ={**os.environ, **more},
        folder=os.getcwd(),
        path=tuple(sys.path),
        argv=tuple(sys.argv),
        authkey=bytes(process.current_process().authkey).hex(),
        threads=threads,
    )


@dataclass(frozen=True, slots=True)
class Descriptors:
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
        own = (self.stdout, self.stderr, self.events, self.outcome, self.stacks, self.payload, self.store)
        return (*(one for one in own if one >= 0), *self.more)


@dataclass(frozen=True, slots=True)
class Order:
    """All that a worker needs to begin."""

    seat: Seat
    surroundings: Surroundings
    descriptors: Descriptors
    # whether torch_xla's runtime is to wake before the function is there; the environment alone does not say that it is
    # wanted, since a launch on the CPU may be asked for where it speaks of TPUs
    through_xla: bool = False

    def at(self, descriptors: Descriptors) -> Order:
        """The same for a process in which the descriptors have other numbers."""
        return replace(self, descriptors=descriptors)

    def to_json(self) -> str:
        """The order as one line."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Order:
        """What `to_json` wrote."""
        said: dict[str, Any] = json.loads(text)
        around, held = said["surroundings"], said["descriptors"]
        return Order(
            seat=Seat(**said["seat"]),
            surroundings=Surroundings(**{**around, "path": tuple(around["path"]), "argv": tuple(around["argv"])}),
            descriptors=Descriptors(**{**held, "more": tuple(held["more"])}),
            through_xla=said["through_xla"],
        )


def numbered(told: Descriptors, arrived: Sequence[int]) -> Descriptors:
    """The descriptors as they are numbered here; they arrive in the order of `Descriptors.all()`."""
    rest = list(arrived)
    fixed = {
        name: rest.pop(0) if getattr(told, name) >= 0 else -1
        for name in ("stdout", "stderr", "events", "outcome", "stacks", "payload", "store")
    }
    return Descriptors(**fixed, more=tuple(rest))


def as_text(orders: Sequence[Order]) -> str:
    """The orders of one process, whose ranks are threads where there are several, in one line."""
    return f"[{', '.join(order.to_json() for order in orders)}]"


def of_text(text: str, arrived: Sequence[int] | None = None) -> list[Order]:
    """What `as_text` wrote; where descriptors have `arrived` under other numbers, one order's after the other's, with these."""
    orders = [Order.from_json(json.dumps(said)) for said in json.loads(text)]
    if arrived is None:
        return orders
    rest = list(arrived)
    return [order.at(numbered(order.descriptors, _taken(rest, len(order.descriptors.all())))) for order in orders]


def _taken(rest: list[int], count: int) -> list[int]:
    taken = rest[:count]
    del rest[:count]
    return taken
