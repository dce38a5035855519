"""A series of numbers as one line of Unicode blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

_BLOCKS = "▁▂▃▄▅▆▇█"
# Where a number is none, or infinite: worth seeing, and higher than no block.
_ODD = "×"


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """
    Numbers from left to right, each block the mean of those that share its place; `×` holds one that is not finite.

    >>> sparkline([1, 2, 3, 4, 3, 2, 1])
    '▁▃▆█▆▃▁'
    """
    means = [_mean(part) for part in _parts(values, width)]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    return "".join(_block(mean, low, high) for mean in means)


def _parts(values: Sequence[float], width: int) -> list[Sequence[float]]:
    count = min(width, len(values))
    edges = [len(values) * index // count for index in range(count + 1)] if count else []
    return [values[first:last] for first, last in pairwise(edges)]


def _mean(values: Sequence[float]) -> float:
    # the sum of large numbers may be infinite though none of them is
    return sum(value / len(values) for value in values)


def _block(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return _ODD
    if high <= low:
        return _BLOCKS[len(_BLOCKS) // 2 - 1]
    share = (value / 2 - low / 2) / (high / 2 - low / 2)  # halves: their difference is finite
    return _BLOCKS[min(int(share * len(_BLOCKS)), len(_BLOCKS) - 1)]
