"""The indices that a loader reads from its sampler, one ahead of the data."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from accelerate_nb.runtime.data.sharding import with_last


class BatchIndices:
    """The indices of one epoch's batches, taken one ahead of the data, so that the last is known when it is loaded."""

    def __init__(self, source: Iterator[Any]) -> None:
        self.given = 0
        self.exhausted = False
        self.last: Any = None
        self._source = source
        self._first: list[Any] | None = None

    def begin(self) -> list[Any]:
        """Read the sampler's first index, unless that has happened: it is when samplers draw their order."""
        if self._first is None:
            self._first = list(islice(self._source, 1))
            self.exhausted = not self._first
        return self._first

    def __iter__(self) -> Iterator[Any]:
        for index, is_last in with_last(chain(self.begin(), self._source)):
            if is_last:
                self.exhausted, self.last = True, index
            self.given += 1
            yield index


class IndexSource:
    """The source of a `DataLoader`'s indices: its sampler, without the first batches of an epoch that was begun before."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.skip = 0
        self.current = BatchIndices(iter(()))

    def __iter__(self) -> Iterator[Any]:
        source = iter(self.sampler)
        self.current = BatchIndices(islice(source, self.skip, None) if self.skip else source)
        return iter(self.current)

    def __len__(self) -> int:
        return len(self.sampler)
