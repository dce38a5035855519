"""Logs of bounded size: the newest items, and the values of a metric, thinned evenly."""

from __future__ import annotations

import math
from collections import deque
from itertools import islice
from typing import Generic, TypeVar

from accelerate_nb.events.model import Metric

T = TypeVar("T")


class BoundedLog(Generic[T]):
    """The newest of many items: at most so many, and not more than so much in all; it counts them all."""

    __slots__ = ("_items", "_most", "_size", "_size_limit", "_sizes", "count")

    def __init__(self, most: int, size_limit: int) -> None:
        self._items: deque[T] = deque()
        self._sizes: deque[int] = deque()
        self._most = most
        self._size = 0
        self._size_limit = size_limit
        self.count = 0

    def append(self, item: T, size: int) -> None:
        """Add an item of a size."""
        self.count += 1
        self._items.append(item)
        self._sizes.append(size)
        self._size += size
        # the newest stays, however large it is
        while len(self._items) > self._most or (self._size > self._size_limit and len(self._items) > 1):
            self._items.popleft()
            self._size -= self._sizes.popleft()

    def last(self, number: int) -> tuple[T, ...]:
        """The newest items, at most `number`, in their order."""
        return tuple(islice(reversed(self._items), max(number, 0)))[::-1]


class MetricSeries:
    """The values of one metric, thinned evenly: when it is full, every second goes, and from then on twice as few come in."""

    __slots__ = ("_broken", "_came", "_every", "_kept", "_most", "newest")

    def __init__(self, most: int) -> None:
        self._most = most
        self._every = 1
        self._came = 0
        self._kept: list[Metric] = []
        # the first of the newest values that are no numbers: where a training broke is not thinned away
        self._broken: Metric | None = None
        self.newest: Metric | None = None

    def append(self, metric: Metric) -> None:
        """Add a value."""
        if self._came % self._every == 0:
            self._kept.append(metric)
        self._came += 1
        self._broken = None if math.isfinite(metric.value) else self._broken or metric
        self.newest = metric
        if len(self._kept) > self._most:
            self._kept = self._kept[::2]
            self._every *= 2

    def points(self) -> tuple[Metric, ...]:
        """The values that were kept, the newest always among them."""
        kept = tuple(self._kept)
        if self._broken is not None and self._broken not in kept:
            at = next((i for i, metric in enumerate(kept) if metric.time > self._broken.time), len(kept))
            kept = (*kept[:at], self._broken, *kept[at:])
        return kept if self.newest is None or kept[-1] is self.newest else (*kept, self.newest)
