"""The metrics of a run as curves: one for each rank, or one band for many."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from accelerate_nb.events.metric_names import in_order, logged_names
from accelerate_nb.events.model import Metric
from accelerate_nb.events.rank_state import RankState

# So many values are read in all: a report of fifty metrics on sixty-four ranks takes a second, not a minute.
MOST_VALUES = 200_000
_BINS = 120
# What the status of a run keeps.
_MOST_KEPT = 50
# More ranks than this are drawn as a band: nobody can distinguish nine lines.
MOST_LINES = 8


@dataclass(frozen=True, slots=True)
class CurveBin:
    """The values that fell into one part of a curve's width."""

    x: float
    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class MetricCurve:
    """
    One metric over the run.

    `x` counts steps where all values had one (`by_step`), otherwise seconds. `newest` holds each rank's last value, `odd`
    counts values that were not finite. `lines` are there for a few ranks, for many only `whole`, the bins of all ranks.
    """

    name: str
    newest: dict[int, float]
    last_step: int | None
    by_step: bool
    odd: int
    whole: tuple[CurveBin, ...]
    lines: dict[int, tuple[CurveBin, ...]]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that logged it."""
        return tuple(self.newest)

    @property
    def mean(self) -> float:
        """The mean of the newest values of all ranks."""
        return sum(value / len(self.newest) for value in self.newest.values())

    @property
    def low(self) -> float:
        """The lowest value of the run; `nan` where none was finite."""
        return min((bin_.low for bin_ in self.whole), default=math.nan)

    @property
    def high(self) -> float:
        """The highest value of the run; `nan` where none was finite."""
        return max((bin_.high for bin_ in self.whole), default=math.nan)


def names_of(ranks: Iterable[RankState]) -> tuple[str, ...]:
    """Every metric's name, those that code logged first, in the order in which they appear."""
    return tuple(in_order(name for rank in ranks for name in rank.series))


def curves_of(ranks: Sequence[RankState], names: Sequence[str], most: int = MOST_VALUES) -> tuple[MetricCurve, ...]:
    """These metrics as curves, of which about `most` values are read."""
    count = sum(len(rank.series.get(name, ())) for rank in ranks for name in names)
    every = max(1, -(-count // most))
    # every so many of the values, the newest always among them
    return tuple(
        _curve(name, {rank.rank: (*found[:-1:every], found[-1]) for rank in ranks if (found := rank.series.get(name))})
        for name in names
    )


def _curve(name: str, series: dict[int, Sequence[Metric]]) -> MetricCurve:
    last = {rank: values[-1] for rank, values in series.items()}
    by_step = all(value.step is not None for values in series.values() for value in values)
    points = {
        rank: [(float(value.step or 0) if by_step else value.time, value.value) for value in values]
        for rank, values in series.items()
    }
    finite = {rank: [point for point in some if math.isfinite(point[1])] for rank, some in points.items()}
    whole = [point for some in finite.values() for point in some]
    first, end = min((x for x, _ in whole), default=0.0), max((x for x, _ in whole), default=0.0)
    few = len(series) <= MOST_LINES
    return MetricCurve(
        name=name,
        newest={rank: metric.value for rank, metric in last.items()},
        last_step=max((metric.step for metric in last.values() if metric.step is not None), default=None),
        by_step=by_step,
        odd=sum(map(len, points.values())) - len(whole),
        whole=_binned(whole, first, end),
        lines={rank: _binned(some, first, end) for rank, some in finite.items() if some} if few else {},
    )


def _binned(points: Sequence[tuple[float, float]], first: float, end: float) -> tuple[CurveBin, ...]:
    """Points gathered into bins of equal width; an empty one is left out."""
    width = (end - first) / _BINS or 1.0
    bins: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        bins.setdefault(min(int((point[0] - first) / width), _BINS - 1), []).append(point)
    return tuple(_bin(bins[index]) for index in sorted(bins))


def _bin(points: Sequence[tuple[float, float]]) -> CurveBin:
    count = len(points)
    values = [value for _, value in points]
    return CurveBin(
        x=sum(x for x, _ in points) / count,
        mean=sum(value / count for value in values),
        low=min(values),
        high=max(values),
    )


def coarsened(curve: MetricCurve) -> MetricCurve:
    """A curve of half as many points."""
    return replace(curve, whole=_halved(curve.whole), lines={rank: _halved(bins) for rank, bins in curve.lines.items()})


def _halved(bins: Sequence[CurveBin]) -> tuple[CurveBin, ...]:
    pairs = [bins[index : index + 2] for index in range(0, len(bins), 2)]
    return tuple(
        CurveBin(
            x=sum(bin_.x for bin_ in pair) / len(pair),
            mean=sum(bin_.mean / len(pair) for bin_ in pair),
            low=min(bin_.low for bin_ in pair),
            high=max(bin_.high for bin_ in pair),
        )
        for pair in pairs
    )


def metric_facts(ranks: Sequence[RankState]) -> dict[str, Any]:
    """What a run's status keeps of its metrics: the newest of each that code logged, and the course of the leading one."""
    newest = {name: metric.value for rank in reversed(ranks) for name, metric in rank.metrics.items()}
    names = logged_names(name for rank in ranks for name in rank.metrics)[:_MOST_KEPT]
    return {"metrics": {name: newest[name] for name in names}, "curve": leading_curve(ranks)}


def leading_curve(ranks: Sequence[RankState]) -> tuple[str, str] | None:
    """The name of the metric that a training is judged by, its loss or else the first that code logged, and its sparkline."""
    names = logged_names(name for rank in ranks for name in rank.series)
    leading = next((name for name in names if "loss" in name.lower()), names[0] if names else None)
    if leading is None:
        return None
    (curve,) = curves_of(ranks, [leading])
    return leading, sparkline([bin_.mean for bin_ in curve.whole])


_BLOCKS = "▁▂▃▄▅▆▇█"
# Where a number is none, or infinite: worth seeing, and higher than no block.
_ODD = "×"


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """
    Numbers from left to right, each block the mean of its part; `×` holds one that is not finite.

    >>> sparkline([1, 2, 3, 4, 3, 2, 1])
    '▁▃▆█▆▃▁'
    """
    # the sum of large numbers may be infinite though none of them is
    means = [sum(value / len(part) for value in part) for part in _parts(values, width)]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    return "".join(_block(mean, low, high) for mean in means)


def _parts(values: Sequence[float], width: int) -> list[Sequence[float]]:
    count = min(width, len(values))
    edges = [len(values) * index // count for index in range(count + 1)] if count else []
    return [values[first:last] for first, last in pairwise(edges)]


def _block(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return _ODD
    if high <= low:
        return _BLOCKS[len(_BLOCKS) // 2 - 1]
    share = (value / 2 - low / 2) / (high / 2 - low / 2)  # halves: their difference is finite
    return _BLOCKS[min(int(share * len(_BLOCKS)), len(_BLOCKS) - 1)]
