"""The indices that a loader reads from its sampler, one ahead of the data."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from hashlib import blake2b
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.data.sharding import BatchSamplerShard, with_last
from accelerate_nb.runtime.operations import collective
from accelerate_nb.runtime.operations.call_check import CollectiveCall, exchange_rows
from accelerate_nb.runtime.world.registry import current_world

# Of an order so many batches, and so many indices, are compared: with fewer of them, shuffled orders may begin alike.
_COMPARED_BATCHES, _COMPARED_INDICES = 8, 64


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
    """
    The source of a `DataLoader`'s indices: its sampler, without the first batches of an epoch that was begun before.

    With a `longest` ranks compare how an epoch's order begins, and where one has another, all take the main process's, which has at most
    so many batches. `order` is the one that was sent so, or that an epoch which goes on was begun with.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.skip = 0
        self.longest: int | None = None
        self.order: list[Any] | None = None
        self.current = BatchIndices(iter(()))

    def __iter__(self) -> Iterator[Any]:
        if self.longest is None and self.order is None:
            source = iter(self.sampler)
        elif isinstance(self.sampler, BatchSamplerShard):
            source = self.sampler.dealt(self._order_of(self.sampler.batch_sampler))
        else:
            source = self._order_of(self.sampler)
        self.current = BatchIndices(islice(source, self.skip, None) if self.skip else source)
        return iter(self.current)

    def __len__(self) -> int:
        return len(self.sampler)

    def _order_of(self, sampler: Any) -> Iterator[Any]:
        """The epoch's order for all ranks; the first step of the iteration draws and compares it."""
        indices = iter(sampler if self.order is None else self.order)
        if self.longest is not None:
            first = _beginning(indices)
            call = CollectiveCall("iter", f"a loader with a {type(_drawing(sampler)).__name__}")
            digest = torch.frombuffer(
                bytearray(blake2b(repr(first).encode(), digest_size=16).digest()), dtype=torch.uint8
            )
            digests = [row.tolist() for row in exchange_rows(current_world(), call, digest)]
            other = next((rank for rank, found in enumerate(digests) if found != digests[0]), None)
            indices = chain(first, indices)
            if other is not None:
                indices = self._sent(sampler, indices, other, self.longest)
        yield from indices

    def _sent(self, sampler: Any, indices: Iterator[Any], other: int, longest: int) -> Iterator[Any]:
        """The main process's order, on all ranks; `ConfigurationError` where it does not end."""
        whose = _drawing(sampler)
        problem = f"{type(whose).__name__} gives rank {other} other samples than the main process, "
        if getattr(whose, "num_replicas", 1) > 1:
            raise ConfigurationError(
                f"{problem}since it deals them out itself. A prepared loader deals them out, too, and parts of the data would be left "
                "out. Make the loader without this sampler, with shuffle=True instead."
            )
        order: list[Any] | None = None
        if current_world().is_main:
            order = list(islice(indices, longest + 1))
            order = None if len(order) > longest else order
        (sent,) = collective.broadcast_object_list([order])
        self.order = order
        if sent is None:
            raise ConfigurationError(
                f"{problem}since it draws from random numbers of its own, and its order can't be sent to all, since it does not end. Draw "
                "the order from a generator that has the same seed on all ranks, or pass dispatch_batches=True."
            )
        return iter(sent)


def _drawing(sampler: Any) -> Any:
    """The sampler that draws an order: the one inside, where batches are torch's own."""
    return sampler.sampler if type(sampler) is BatchSampler else sampler


def _beginning(indices: Iterator[Any]) -> list[Any]:
    """The first batches of an order, as many as are compared."""
    first: list[Any] = []
    count = 0
    for item in indices:
        first.append(item)
        count += len(item) if isinstance(item, Sized) else 1
        if len(first) >= _COMPARED_BATCHES and count >= _COMPARED_INDICES:
            break
    return first
