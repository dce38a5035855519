"""The metrics of a run as curves: one for each rank, or one band for many."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from accelerate_nb.events.model import Metric
from accelerate_nb.events.view import RankView

# So many values are looked at in all: a report of fifty metrics on sixty-four ranks takes a second, not a minute.
MOST_VALUES = 200_000
_BINS = 120
# More ranks than this are drawn as a band: nobody tells nine lines apart.
MOST_LINES = 8


@dataclass(frozen=True, slots=True)
class Bin:
    """The values that fell into one part of a curve's width."""

    x: float
    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Curve:
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
    whole: tuple[Bin, ...]
    lines: dict[int, tuple[Bin, ...]]

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
        return min((one.low for one in self.whole), default=math.nan)

    @property
    def high(self) -> float:
        """The highest value of the run; `nan` where none was finite."""
        return max((one.high for one in self.whole), default=math.nan)


def names_of(ranks: Iterable[RankView]) -> tuple[str, ...]:
    """Every metric's name, in the order in which they appear."""
    return tuple(dict.fromkeys(name for rank in ranks for name in rank.series))


def curves_of(ranks: Sequence[RankView], names: Sequence[str], most: int = MOST_VALUES) -> tuple[Curve, ...]:
    """These metrics as curves, of which about `most` values are looked at."""
    count = sum(len(rank.series.get(name, ())) for rank in ranks for name in names)
    every = max(1, -(-count // most))
    return tuple(
        _curve(name, {rank.rank: _thinned(rank.series[name], every) for rank in ranks if rank.series.get(name)})
        for name in names
    )


def _thinned(series: Sequence[Metric], every: int) -> Sequence[Metric]:
    """Every so many of these values, the newest always among them."""
    return series if every == 1 else (*islice(series, 0, len(series) - 1, every), series[-1])


def _curve(name: str, series: dict[int, Sequence[Metric]]) -> Curve:
    last = {rank: values[-1] for rank, values in series.items()}
    by_step = all(one.step is not None for values in series.values() for one in values)
    points = {rank: [_point(one, by_step) for one in values] for rank, values in series.items()}
    finite = {rank: [point for point in some if _is_finite(point)] for rank, some in points.items()}
    whole = [point for some in finite.values() for point in some]
    first, end = min((x for x, _ in whole), default=0.0), max((x for x, _ in whole), default=0.0)
    few = len(series) <= MOST_LINES
    return Curve(
        name=name,
        newest={rank: one.value for rank, one in last.items()},
        last_step=max((one.step for one in last.values() if one.step is not None), default=None),
        by_step=by_step,
        odd=sum(map(len, points.values())) - len(whole),
        whole=_binned(whole, first, end),
        lines={rank: _binned(some, first, end) for rank, some in finite.items() if some} if few else {},
    )


def _point(metric: Metric, by_step: bool) -> tuple[float, float]:
    return float(metric.step or 0) if by_step else metric.time, metric.value


def _is_finite(point: tuple[float, float]) -> bool:
    return math.isfinite(point[1])


def _binned(points: Sequence[tuple[float, float]], first: float, end: float) -> tuple[Bin, ...]:
    """Points gathered into bins of equal width; an empty one is left out."""
    width = (end - first) / _BINS or 1.0
    bins: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        bins.setdefault(min(int((point[0] - first) / width), _BINS - 1), []).append(point)
    return tuple(_bin(bins[index]) for index in sorted(bins))


def _bin(points: Sequence[tuple[float, float]]) -> Bin:
    count = len(points)
    values = [value for _, value in points]
    return Bin(
        x=sum(x for x, _ in points) / count,
        mean=sum(value / count for value in values),
        low=min(values),
        high=max(values),
    )
