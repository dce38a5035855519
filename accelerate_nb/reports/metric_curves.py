"""The metrics of a run as curves, one for each rank or one band for many; in a line of text, and as pictures legible on light and on dark."""

from __future__ import annotations

import html
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

from msgspec import structs

from accelerate_nb.events.event_types import Metric
from accelerate_nb.events.run_state import SUMMED, RankState, in_order, logged_names
from accelerate_nb.events.terminal_lines import plain
from accelerate_nb.reports.text_format import counted, ranks_text, value_text

# So many values are read in all: a report of fifty metrics on sixty-four ranks takes a second, not a minute.
MOST_VALUES = 200_000
_BINS = 120
# What the status of a run keeps.
_MOST_KEPT = 50
# More ranks than this are drawn as a band: nobody can distinguish nine lines.
MOST_LINES = 8


class CurveBin(NamedTuple):
    """The values that fell into one part of a curve's width."""

    x: float
    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, xs: Sequence[float], means: Sequence[float], lows: Sequence[float], highs: Sequence[float]) -> CurveBin:
        """These values, or bins of them, in one."""
        return cls(sum(xs) / len(xs), sum(mean / len(means) for mean in means), min(lows), max(highs))


@dataclass(frozen=True, slots=True)
class MetricCurve:
    """One metric over the run: `lines` for a few ranks, for many only `whole`, the bins of all ranks."""

    name: str
    ranks: tuple[int, ...]
    # the number of all ranks, and what it is of them ("mean of 2"; empty for one rank)
    newest: float
    how: str
    # the most values of a rank
    points: int
    last_step: int
    # where values are no numbers, in words, and the part of `x`, up to the newest, in which some rank has none
    not_finite: str
    broken: tuple[float, float] | None
    whole: tuple[CurveBin, ...]
    lines: dict[int, tuple[CurveBin, ...]]

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


def curves_of(
    ranks: Sequence[RankState], names: Sequence[str], most: int = MOST_VALUES, *, of: Literal["rank", "run"] = "rank"
) -> tuple[MetricCurve, ...]:
    """These metrics as curves, of which about `most` values are read; of runs, which have no sum, each is a line."""
    count = sum(len(rank.series.get(name, ())) for rank in ranks for name in names)
    return tuple(_curve(name, series_of(ranks, name), max(1, -(-count // most)), of) for name in names)


def series_of(ranks: Sequence[RankState], name: str) -> dict[int, Sequence[Metric]]:
    """The values of a metric by rank, where there are any."""
    return {rank.rank: found for rank in ranks if (found := rank.series.get(name))}


def newest_of(name: str, series: Mapping[int, Sequence[Metric]]) -> tuple[float, str]:
    """The mean or sum of all ranks at the last step that each of them has, and what it is: `(1.5, 'mean of 2')`."""
    if len(series) > 1 and name in SUMMED:
        return sum_of_ranks(series)[-1].value, f"sum of {len(series)}"
    step = min(values[-1].step or 0 for values in series.values())
    last = [_nearest(values, step) for values in series.values()]
    return sum(metric.value / len(last) for metric in last), f"mean of {len(last)}" if len(last) > 1 else ""


def _nearest(values: Sequence[Metric], step: int) -> Metric:
    """The value whose step is nearest, from the end of the series on."""
    found = values[-1]
    for metric in reversed(values):
        if abs((metric.step or 0) - step) > abs((found.step or 0) - step):
            break
        found = metric
    return found


def sum_of_ranks(series: Mapping[int, Sequence[Metric]]) -> list[Metric]:
    """The sum over ranks, at each moment that all of them have reported: of each rank what it reported last until then."""
    until = min(values[-1].time for values in series.values())
    newest: dict[int, Metric] = {}
    found: list[Metric] = []
    for metric in sorted((metric for values in series.values() for metric in values), key=lambda metric: metric.time):
        newest[metric.rank] = metric
        if len(newest) == len(series) and (metric.time <= until or not found):
            step = max(known.step or 0 for known in newest.values())
            found.append(structs.replace(metric, value=sum(known.value for known in newest.values()), step=step))
    return found


def _curve(name: str, every_rank: dict[int, Sequence[Metric]], every: int, of: Literal["rank", "run"]) -> MetricCurve:
    newest, how = newest_of(name, every_rank) if of == "rank" else (math.nan, "")
    whole_series = {0: sum_of_ranks(every_rank)} if how.startswith("sum") else every_rank
    # every so many of the values, the newest always among them
    series = {rank: (*values[:-1:every], values[-1]) for rank, values in whole_series.items()}
    points = {rank: [(float(value.step or 0), value.value) for value in values] for rank, values in series.items()}
    finite = {rank: [point for point in some if math.isfinite(point[1])] for rank, some in points.items()}
    whole = [point for some in finite.values() for point in some]
    first, end = min((x for x, _ in whole), default=0.0), max((x for x, _ in whole), default=0.0)
    binned = {rank: _binned(some, first, end) for rank, some in finite.items() if some}
    return MetricCurve(
        name=name,
        ranks=tuple(every_rank),
        newest=newest,
        how=how,
        points=max(map(len, every_rank.values())),
        last_step=max(values[-1].step or 0 for values in series.values()),
        not_finite=not_finite_text(series) if of == "rank" else "",
        broken=(
            min(points[rank][-count][0] for rank, count in broken.items()),
            max(some[-1][0] for some in points.values()),
        )
        if (broken := _broken(series))
        else None,
        whole=_together([*binned.values()]),
        lines={rank: (*bins.values(),) for rank, bins in binned.items()} if len(series) <= MOST_LINES else {},
    )


def not_finite_text(series: Mapping[int, Sequence[Metric]]) -> str:
    """Where values are no numbers, in words: `NaN since step 60, on all ranks`; empty where all are finite."""
    odd = {rank: some for rank, values in series.items() if (some := [m for m in values if not math.isfinite(m.value)])}
    if not odd:
        return ""
    if broken := _broken(series):
        odd = {rank: odd[rank][-count:] for rank, count in broken.items()}
        first = min((values[0] for values in odd.values()), key=lambda metric: metric.step or 0)
        where = f" since step {first.step:,}"
    else:
        newest = max((values[-1] for values in odd.values()), key=lambda metric: metric.step or 0)
        where = f" until step {newest.step:,}"
    kinds = {"NaN" if math.isnan(metric.value) else "infinite" for values in odd.values() for metric in values}
    ranks = "all ranks" if len(odd) == len(series) else f"rank{'' if len(odd) == 1 else 's'} {ranks_text(odd)}"
    return f"{kinds.pop() if len(kinds) == 1 else 'not finite'}{where}{f', on {ranks}' if len(series) > 1 else ''}"


def _broken(series: Mapping[int, Sequence[Metric]]) -> dict[int, int]:
    """The ranks whose newest values are no numbers, and how many of them."""
    counts = {
        rank: next((i for i, metric in enumerate(reversed(values)) if math.isfinite(metric.value)), len(values))
        for rank, values in series.items()
    }
    return {rank: count for rank, count in counts.items() if count}


def _binned(points: Sequence[tuple[float, float]], first: float, end: float) -> dict[int, CurveBin]:
    """Points gathered into bins of equal width by their numbers, in order; an empty one is left out."""
    width = (end - first) / _BINS or 1.0
    bins: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        bins.setdefault(min(int((point[0] - first) / width), _BINS - 1), []).append(point)
    found = {}
    for index in sorted(bins):
        xs, values = zip(*bins[index], strict=True)
        found[index] = CurveBin.of(xs, values, values, values)
    return found


def _together(every: Sequence[Mapping[int, CurveBin]]) -> tuple[CurveBin, ...]:
    """The mean and the range of all ranks in each bin; a rank that reported nothing in it counts with its value there."""
    means = [[(bin_.x, bin_.mean) for bin_ in bins.values()] for bins in every]
    found = []
    for index in sorted({index for bins in every for index in bins}):
        own = [bins[index] for bins in every if index in bins]
        x = sum(bin_.x / len(own) for bin_ in own)
        missing = (value_at(points, x) for points, bins in zip(means, every, strict=True) if index not in bins)
        others = [value for value in missing if value is not None]
        means_, lows, highs = ([getattr(bin_, part) for bin_ in own] + others for part in ("mean", "low", "high"))
        found.append(CurveBin.of([x], means_, lows, highs))
    return tuple(found)


def value_at(points: Sequence[tuple[float, float]], x: float) -> float | None:
    """A series' value at `x`: interpolated between points, after the last one carried forward; `None` before the first."""
    index = bisect_right(points, (x, math.inf))
    if index == 0:
        return None
    before = points[index - 1]
    if index == len(points) or before[0] == x:
        return before[1]
    share = (x - before[0]) / (points[index][0] - before[0])
    return before[1] * (1 - share) + points[index][1] * share


def coarsened(curve: MetricCurve) -> MetricCurve:
    """A curve of half as many points."""

    def halved(bins: Sequence[CurveBin]) -> tuple[CurveBin, ...]:
        pairs = (bins[index : index + 2] for index in range(0, len(bins), 2))
        return tuple(CurveBin.of(*zip(*pair, strict=True)) for pair in pairs)

    return replace(curve, whole=halved(curve.whole), lines={rank: halved(bins) for rank, bins in curve.lines.items()})


def metric_facts(ranks: Sequence[RankState]) -> dict[str, Any]:
    """What a run's status keeps of its metrics: the number of each that code logged, of how many ranks, and the leading one's course."""
    names = logged_names(name for rank in ranks for name in rank.series)
    newest = {name: newest_of(name, series_of(ranks, name)) for name in names[:_MOST_KEPT]}
    # the metric that a training is judged by: its loss, or else the first
    leading = [*(name for name in names if "loss" in name.lower()), *names][:1]
    courses = {curve.name: sparkline([bin_.mean for bin_ in curve.whole]) for curve in curves_of(ranks, leading)}
    return {
        "metrics": {name: value for name, (value, _) in newest.items()},
        "metrics_of": {name: how for name, (_, how) in newest.items() if how},
        "curve": next(iter(courses.items()), None),
    }


_BLOCKS = "▁▂▃▄▅▆▇█"
# Where a number is none, or infinite: worth seeing, and higher than no block.
_ODD = "×"


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Numbers from left to right, each block the mean of its part; `×` holds one that is not finite."""
    count = min(width, len(values))
    edges = [len(values) * index // count for index in range(count + 1)] if count else []
    parts = [values[first:last] for first, last in pairwise(edges)]
    # the sum of large numbers may be infinite though none of them is
    means = [sum(value / len(part) for value in part) for part in parts]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    blocks = []
    for mean in means:
        # halves: their difference is finite
        share = (mean / 2 - low / 2) / (high / 2 - low / 2) if high / 2 > low / 2 else 0.4
        blocks.append(_BLOCKS[min(int(share * len(_BLOCKS)), len(_BLOCKS) - 1)] if math.isfinite(mean) else _ODD)
    return "".join(blocks)


# --------------------------------------------------------------------------------------------------------------------- pictures

# Each is legible on white and on black; a rank keeps its colour in every chart.
COLOURS = ("#3b82c4", "#d97f23", "#3a9a5b", "#cf4a4a", "#8b6bbf", "#9c6b4f", "#c75fa5", "#2a979b")
_GREY = "gray"
_WIDTH, _HEIGHT = 300, 110
_LEFT, _TOP, _BOTTOM = 8, 26, 94
# The curve is drawn four times as fine as the picture's pixels: whole numbers are short.
_FINE = 4
# What an attribute's URL can have as it is; a browser takes the ends of lines out.
_UNQUOTED = " \n!$'()*+,-./:;<=>@_~"
_PER_LINE = 12


def picture(curve: MetricCurve, of: Literal["rank", "run"] = "rank", scale: float = 1.0) -> str:
    """An `<img>` of a metric's curve, enlarged by `scale`: a line for each rank (or run, by `of`), or the mean in a band."""
    source = quote(svg(curve, of).replace('"', "'"), safe=_UNQUOTED)
    # in words, for those who can't see it
    over = f" up to step {curve.last_step:,}" if curve.last_step else ""
    last = f", last {value_text(curve.newest)}{curve.how and f' ({curve.how} ranks)'}" if of == "rank" else ""
    described = (
        f"chart of {_name(curve)}{over}, {counted(len(curve.ranks), of)}: min {value_text(curve.low)}, max {value_text(curve.high)}"
        f"{last}{curve.not_finite and f', {curve.not_finite}'}"
    )
    return (
        f'<img width="{_WIDTH * scale:g}" height="{_HEIGHT * scale:g}" alt="{html.escape(described)}"\n'
        f'src="data:image/svg+xml,{source}">'
    )


def svg(curve: MetricCurve, of: Literal["rank", "run"] = "rank") -> str:
    """The picture itself."""
    name = _name(curve)
    label = html.escape(name if len(name) <= 20 else f"{name[:9]}…{name[-10:]}")
    if of == "rank":
        label += f' <tspan font-weight="normal">{value_text(curve.newest)} {curve.how}</tspan>'
    end = f"step {curve.last_step:,}" if curve.last_step else ""
    span = curve.not_finite or f"min {value_text(curve.low)}, max {value_text(curve.high)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="11" '
        f'fill="{_GREY}">\n<rect x=".5" y=".5" width="{_WIDTH - 1}" height="{_HEIGHT - 1}" rx="4" fill="none" '
        f'stroke="{_GREY}" stroke-opacity=".4"/>\n'
        f'<text x="{_LEFT}" y="17" font-size="12" font-weight="bold">{label}</text>\n'
        f'<text x="{_LEFT}" y="{_HEIGHT - 5}">{html.escape(span)}</text>\n'
        f'<text x="{_WIDTH - _LEFT}" y="{_HEIGHT - 5}" text-anchor="end">{html.escape(end)}</text>\n'
        f'<g transform="scale({1 / _FINE:g})" fill="none" stroke-linejoin="round" stroke-linecap="round">\n{_shapes(curve)}\n</g></svg>'
    )


def _shapes(curve: MetricCurve) -> str:
    """A line for each rank, or a band with the mean in it, over a red field where values are no numbers."""
    xs = [bin_.x for bin_ in curve.whole]
    first, end = min(xs, default=0.0), max([*xs, *(curve.broken or ())[1:]], default=0.0)
    low, high = (0.0, 0.0) if math.isnan(curve.low) else (curve.low, curve.high)

    def point(x: float, y: float) -> tuple[int, int]:
        across = (x - first) / (end - first) if end > first else 0.5
        up = (y / 2 - low / 2) / (high / 2 - low / 2) if high / 2 > low / 2 else 0.5
        x, y = _LEFT + across * (_WIDTH - 2 * _LEFT), _BOTTOM - 4 - up * (_BOTTOM - _TOP - 6)
        return round(_FINE * x), round(_FINE * y)

    def line(bins: Sequence[CurveBin], colour: str, width: float) -> str:
        # a single one is a dot, which is what a line of no length with round ends is
        stroke = _FINE * (width if len(bins) > 1 else 6)
        path = _path([point(bin_.x, bin_.mean) for bin_ in bins])
        return f'<path stroke="{colour}" stroke-width="{stroke:g}" d="{path}"/>'

    field = ""
    if curve.broken is not None and curve.whole:
        (left, _), (right, _) = (point(x, 0.0) for x in curve.broken)
        shape = f"M{left} {_FINE * _TOP}H{max(right, left + _FINE)}V{_FINE * _BOTTOM}H{left}z"
        field = f'<path fill="{COLOURS[3]}" fill-opacity=".25" d="{shape}"/>\n'
    if curve.lines or not curve.whole:
        lines = sorted(curve.lines.items(), reverse=True)
        return field + "\n".join(line(bins, COLOURS[rank % len(COLOURS)], 1.4) for rank, bins in lines)
    edge = [point(bin_.x, bin_.high) for bin_ in curve.whole] + [point(bin_.x, bin_.low) for bin_ in curve.whole[::-1]]
    band = f'<path fill="{COLOURS[0]}" fill-opacity=".25" d="{_path(edge)}z"/>'
    return field + band + line(curve.whole, COLOURS[0], 1.6)


def _path(points: Sequence[tuple[int, int]]) -> str:
    """An SVG path through these points: the first where it is, each other one by how far it is from the last."""
    if len(points) == 1:
        return f"M{points[0][0]} {points[0][1]}h.1"
    steps = [f"{x - a} {y - b}" for (a, b), (x, y) in pairwise(points)]
    # in lines, so that where a few numbers have changed a few lines differ; they still have a space where a URL has no lines
    chunks = (steps[index : index + _PER_LINE] for index in range(0, len(steps), _PER_LINE))
    parts = (" ".join(part).replace(" -", "-") for part in chunks)
    lines = " \n".join(parts)
    return f"M{points[0][0]} {points[0][1]}l{lines}"


def _name(curve: MetricCurve) -> str:
    name = plain(curve.name)
    return name if len(name) <= 60 else f"{name[:60]}…"
