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
        self._held: list[Any] = []
        self._begun = False

    def __iter__(self) -> Indices:
        return self

    def __next__(self) -> Any:
        self.begin()
        if self.exhausted:
            raise StopIteration
        index = self._held.pop()
        self._take()
        self.given += 1
        return index

    def begin(self) -> None:
        """Ask the sampler for its first index, unless that has happened: it is when samplers draw their order."""
        if not self._begun:
            self._begun = True
            self._take()

    def _take(self) -> None:
        for index in self._source:
            self._held.append(index)
            return
        self.exhausted = True


class IndexSource:
    """What a `DataLoader` takes indices from: its sampler, without the first batches of an epoch that was begun before."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.skip = 0
        self.current = Indices(iter(()))

    def __iter__(self) -> Indices:
        source = iter(self.sampler)
        self.current = Indices(islice(source, self.skip, None) if self.skip else source)
        return self.current

    def __len__(self) -> int:
        return len(self.sampler)
