"""Values of names, followed through a notebook: what binds them, on which side, and what they read when they are used."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Side: TypeAlias = Literal["notebook", "ranks"]


@dataclass(frozen=True, eq=False)
class DeferredUse:
    """A name that is read, or written, when a value is used: as it is there then, or as it was when the value was sent."""

    name: str
    side: Side
    sent: BoundValue | None = None
    writes: bool = False


@dataclass(frozen=True, eq=False)
class BoundValue:
    """
    The value of a name, from one position in the notebook on.

    Two values with the same `key` are the same thing. `part` of the ranks has it, and others may not.
    """

    cell: int
    side: Side | None = None
    key: Hashable = None
    deferred: tuple[DeferredUse, ...] = ()
    part: bool = False
    doing: str = "bound"

    def is_same(self, other: BoundValue | None) -> bool:
        """Whether both are one thing, wherever it is."""
        return other is self or (other is not None and self.key is not None and self.key == other.key)

    def is_module(self) -> bool:
        """Whether it was imported."""
        return isinstance(self.key, tuple) and self.key[:1] in {("import",), ("from",)}


@dataclass(frozen=True, slots=True)
class NameTable:
    """
    The values of each name: the notebook's, the ranks', and the script's, which has one for both.

    A state is never changed once another was made of it.
    """

    notebook: dict[str, BoundValue] = field(default_factory=dict)
    ranks: dict[str, BoundValue] = field(default_factory=dict)
    script: dict[str, BoundValue] = field(default_factory=dict)

    def of(self, side: Side) -> dict[str, BoundValue]:
        """One side's names."""
        return self.notebook if side == "notebook" else self.ranks

    def copy(self) -> NameTable:
        """The same, to go another way with."""
        return NameTable(dict(self.notebook), dict(self.ranks), dict(self.script))


def all_of(deferred: Iterable[DeferredUse], names: NameTable) -> Iterator[DeferredUse]:
    """The deferred uses, and those that they read in turn."""
    waiting, known = list(deferred), set[tuple[str, Side]]()
    while waiting:
        item = waiting.pop()
        if (item.name, item.side) in known:
            continue
        known.add((item.name, item.side))
        yield item
        value = item.sent or names.of(item.side).get(item.name)
        waiting += value.deferred if value is not None else ()


def unique(deferred: Iterable[DeferredUse]) -> Iterator[DeferredUse]:
    """The deferred uses, each once."""
    known: set[tuple[str, Side, int, bool]] = set()
    for item in deferred:
        mark = (item.name, item.side, id(item.sent), item.writes)
        if mark not in known:
            known.add(mark)
            yield item
