"""The indices that a loader asks its sampler for, one ahead of the data."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any


class Indices:
    """The indices of one epoch's batches, taken one ahead of the data, so that the last is known when it is loaded."""

    def __init__(self, source: Iterator[Any]) -> None:
        self.given = 0
        self.exhausted = False
        self._source = source
        self._first: list[Any] | None = None

    def begin(self) -> list[Any]:
        """Ask the sampler for its first index, unless that has happened: it is when samplers draw their order."""
        if self._first is None:
            self._first = list(islice(self._source, 1))
            self.exhausted = not self._first
        return self._first

    def __iter__(self) -> Iterator[Any]:
        for held in self.begin():
            index = held
            for following in self._source:
                self.given += 1
                yield index
                index = following
            self.exhausted = True
            self.given += 1
            yield index


class IndexSource:
    """What a `DataLoader` takes indices from: its sampler, without the first batches of an epoch that was begun before."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.skip = 0
        self.current = Indices(iter(()))

    def __iter__(self) -> Iterator[Any]:
        source = iter(self.sampler)
        self.current = Indices(islice(source, self.skip, None) if self.skip else source)
        return iter(self.current)

    def __len__(self) -> int:
        return len(self.sampler)
