"""Environment variables of which each rank of a process has its own, where ranks are threads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from accelerate_nb.own import Own

_own: Own[dict[bytes, bytes]] = Own(dict)


class _Variables(MutableMapping[bytes, bytes]):
    """A process's variables, but for some names, under which each rank finds its own, or nothing."""

    def __init__(self, shared: MutableMapping[bytes, bytes], names: frozenset[bytes]) -> None:
        self._shared, self._names = shared, names

    def _at(self, name: bytes) -> MutableMapping[bytes, bytes]:
        return _own.get() if name in self._names else self._shared

    def __getitem__(self, name: bytes) -> bytes:
        return self._at(name)[name]

    def __setitem__(self, name: bytes, value: bytes) -> None:
        self._at(name)[name] = value

    def __delitem__(self, name: bytes) -> None:
        del self._at(name)[name]

    def __iter__(self) -> Iterator[bytes]:
        # at once, as of a dictionary: another rank may write while they are gone through
        return iter([*self._shared, *_own.get()])

    def __len__(self) -> int:
        return len(self._shared) + len(_own.get())


def separate(names: tuple[str, ...]) -> None:
    """
    From now on `os.environ` says, under these names, what the rank that asks was told by `say`, and nothing to others.

    Python's variables only: a process has one environment, and what it starts as another program, or reads in C, finds
    none of these names there. A wrong rank would be worse than none.
    """
    environ: Any = os.environ
    for name in names:
        os.environ.pop(name, None)
    environ._data = _Variables(environ._data, frozenset(map(os.fsencode, names)))


def say(values: Mapping[str, str]) -> None:
    """Tell this rank what it finds under names that were separated."""
    _own.get().update({os.fsencode(name): os.fsencode(value) for name, value in values.items()})
