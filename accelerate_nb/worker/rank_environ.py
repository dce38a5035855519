"""Environment variables of which each rank of a process has its own, where ranks are threads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from accelerate_nb.rank_local import RankLocal

_variables: RankLocal[dict[bytes, bytes]] = RankLocal(dict)


class _RankVariables(MutableMapping[bytes, bytes]):
    """A process's variables, but for some names, under which each rank finds its own, or nothing."""

    def __init__(self, shared: MutableMapping[bytes, bytes], names: frozenset[bytes]) -> None:
        self._shared, self._names = shared, names

    def _at(self, name: bytes) -> MutableMapping[bytes, bytes]:
        return _variables.get() if name in self._names else self._shared

    def __getitem__(self, name: bytes) -> bytes:
        return self._at(name)[name]

    def __setitem__(self, name: bytes, value: bytes) -> None:
        self._at(name)[name] = value

    def __delitem__(self, name: bytes) -> None:
        del self._at(name)[name]

    def __iter__(self) -> Iterator[bytes]:
        # at once, as of a dictionary: another rank may write while they are gone through
        return iter([*self._shared, *_variables.get()])

    def __len__(self) -> int:
        return len(self._shared) + len(_variables.get())


def separate(names: tuple[str, ...]) -> None:
    """
    Make `os.environ` give, under these names, each rank the values of its own `set_variables`, and others nothing.

    Python's variables only: a process has one environment, and what it starts as another program, or reads in C, finds
    none of these names there. A wrong rank would be worse than none.
    """
    environ: Any = os.environ
    for name in names:
        os.environ.pop(name, None)
    environ._data = _RankVariables(environ._data, frozenset(map(os.fsencode, names)))


def set_variables(values: Mapping[str, str]) -> None:
    """Set this rank's values of variables that were separated."""
    _variables.get().update({os.fsencode(name): os.fsencode(value) for name, value in values.items()})
