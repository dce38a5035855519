"""The points of metrics as differences between whole numbers, which pack into half of the bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from decimal import Decimal
from itertools import pairwise
from typing import Any

# A page's numbers are whole up to here, and its powers of ten exact.
_LARGEST = 2**53
_MOST_DECIMALS = 22


def in_columns(message: dict[str, Any]) -> dict[str, Any]:
    """
    A message whose `metrics` are in `columns` where all points have a step and a finite value; a page reads the same numbers.

    The columns are the series' names and ranks, the decimals of their values, their steps, values and times. A list has its
    first number, then what is added to it: values in units of their last decimal, times in hundredths of a second.
    """
    found, others = [], []
    for name, rank, points in message.get("metrics", []):
        if (columns := _columns(points)) is None:
            others.append([name, rank, points])
        else:
            found.append([[name, rank], *columns])
    rest = {key: value for key, value in message.items() if key != "metrics"}
    return {
        **rest,
        **({"metrics": others} if others else {}),
        **({"columns": [*zip(*found, strict=True)]} if found else {}),
    }


def _columns(points: Sequence[Sequence[Any]]) -> list[Any] | None:
    if not all(
        isinstance(step, int) and isinstance(value, int | float) and math.isfinite(value) for step, value, _ in points
    ):
        return None
    values = [Decimal(repr(value)) for _, value, _ in points]
    decimals = max((-int(value.normalize().as_tuple().exponent) for value in values), default=0)
    decimals = max(decimals, 0)
    scaled = [int(value.scaleb(decimals)) for value in values]
    if decimals > _MOST_DECIMALS or any(abs(value) >= _LARGEST for value in scaled):
        return None
    times = [round(time * 100) for _, _, time in points]
    return [decimals, [*_differences([step for step, _, _ in points])], [*_differences(scaled)], [*_differences(times)]]


def _differences(numbers: Sequence[int]) -> Iterator[int]:
    return (number - before for before, number in pairwise([0, *numbers]))
