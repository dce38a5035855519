"""A metric's curve as a picture that stands in HTML by itself, legible on light and on dark."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal
from urllib.parse import quote

from accelerate_nb.events.terminal_lines import plain
from accelerate_nb.reports.metric_curves import CurveBin, MetricCurve
from accelerate_nb.reports.number_format import counted, time_text, value_text

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
_AT_END = ' text-anchor="end"'


def picture(curve: MetricCurve, of: Literal["rank", "run"] = "rank", scale: float = 1.0) -> str:
    """
    An `<img>` of a metric's curve: a line for each rank, or the mean in a band from the lowest to the highest.

    `of` is what its lines are: of runs, whose mean says nothing, no newest value is shown. `scale` enlarges it.
    """
    source = quote(svg(curve, of).replace('"', "'"), safe=_UNQUOTED)
    return (
        f'<img width="{_WIDTH * scale:g}" height="{_HEIGHT * scale:g}" alt="{html.escape(described(curve, of))}"\n'
        f'src="data:image/svg+xml,{source}">'
    )


def described(curve: MetricCurve, of: Literal["rank", "run"] = "rank") -> str:
    """A curve in words, for those who can't see it."""
    over = f" up to step {curve.last_step:,}" if curve.last_step is not None else ""
    return (
        f"chart of {_name(curve)}{over}, {counted(len(curve.ranks), of)}: "
        f"min {value_text(curve.low)}, max {value_text(curve.high)}"
        + (f", last {value_text(curve.newest)}{curve.how and f' ({curve.how} ranks)'}" if of == "rank" else "")
        + (f", {curve.not_finite}" if curve.not_finite else "")
    )


def svg(curve: MetricCurve, of: Literal["rank", "run"] = "rank") -> str:
    """The picture itself."""
    frame = _ChartFrame(curve)
    span = curve.not_finite or f"min {value_text(curve.low)}, max {value_text(curve.high)}"
    shapes = "\n".join(
        frame.line(bins, COLOURS[rank % len(COLOURS)], 1.4) for rank, bins in sorted(curve.lines.items(), reverse=True)
    ) or frame.band(curve.whole)
    shapes = frame.broken(curve) + shapes
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="11" '
        f'fill="{_GREY}">\n<rect x=".5" y=".5" width="{_WIDTH - 1}" height="{_HEIGHT - 1}" rx="4" fill="none" '
        f'stroke="{_GREY}" stroke-opacity=".4"/>\n'
        f'<text x="{_LEFT}" y="17" font-size="12" font-weight="bold">{_label(curve, of)}</text>\n'
        f"{_text(_LEFT, _HEIGHT - 5, span)}\n"
        f"{_text(_WIDTH - _LEFT, _HEIGHT - 5, _end(curve), _AT_END)}\n"
        f'<g transform="scale({1 / _FINE:g})" fill="none" stroke-linejoin="round" stroke-linecap="round">\n{shapes}\n</g></svg>'
    )


class _ChartFrame:
    """The mapping of a curve's values to the picture."""

    def __init__(self, curve: MetricCurve) -> None:
        xs = [bin_.x for bin_ in curve.whole]
        self._first, self._end = min(xs, default=0.0), max([*xs, *(curve.broken or ())[1:]], default=0.0)
        self._low, self._high = (0.0, 0.0) if math.isnan(curve.low) else (curve.low, curve.high)

    def line(self, bins: Sequence[CurveBin], colour: str, width: float) -> str:
        """The means as a line; a single one is a dot, which is what a line of no length with round ends is."""
        points = [self._point(bin_.x, bin_.mean) for bin_ in bins]
        return f'<path stroke="{colour}" stroke-width="{_FINE * (width if len(points) > 1 else 6):g}" d="{_path(points)}"/>'

    def band(self, bins: Sequence[CurveBin]) -> str:
        """The means as a line, from the lowest to the highest as a band."""
        if not bins:
            return ""
        edge = [self._point(bin_.x, bin_.high) for bin_ in bins]
        edge += [self._point(bin_.x, bin_.low) for bin_ in bins[::-1]]
        return f'<path fill="{COLOURS[0]}" fill-opacity=".25" d="{_path(edge)}z"/>{self.line(bins, COLOURS[0], 1.6)}'

    def broken(self, curve: MetricCurve) -> str:
        """A red field where values are no numbers."""
        if curve.broken is None or not curve.whole:
            return ""
        (left, _), (right, _) = (self._point(x, 0.0) for x in curve.broken)
        shape = f"M{left} {_FINE * _TOP}H{max(right, left + _FINE)}V{_FINE * _BOTTOM}H{left}z"
        return f'<path fill="{COLOURS[3]}" fill-opacity=".25" d="{shape}"/>\n'

    def _point(self, x: float, y: float) -> tuple[int, int]:
        across = (x - self._first) / (self._end - self._first) if self._end > self._first else 0.5
        up = (y / 2 - self._low / 2) / (self._high / 2 - self._low / 2) if self._high > self._low else 0.5
        x, y = _LEFT + across * (_WIDTH - 2 * _LEFT), _BOTTOM - 4 - up * (_BOTTOM - _TOP - 6)
        return round(_FINE * x), round(_FINE * y)


def _path(points: Sequence[tuple[int, int]]) -> str:
    """An SVG path through these points: the first where it is, each other one by how far it is from the last."""
    if len(points) == 1:
        return f"M{points[0][0]} {points[0][1]}h.1"
    steps = (f"{x - a} {y - b}" for (a, b), (x, y) in pairwise(points))
    # in lines, so that where a few numbers have changed a few lines differ; they still have a space where a URL has no lines
    parts = [" ".join(part).replace(" -", "-") for part in _chunks([*steps], _PER_LINE)]
    lines = " \n".join(parts)
    return f"M{points[0][0]} {points[0][1]}l{lines}"


def _chunks(items: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    return (items[index : index + size] for index in range(0, len(items), size))


def _text(x: int, y: int, text: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}"{more}>{html.escape(text)}</text>'


def _name(curve: MetricCurve) -> str:
    name = plain(curve.name)
    return name if len(name) <= 60 else f"{name[:60]}…"


def _label(curve: MetricCurve, of: Literal["rank", "run"]) -> str:
    name = _name(curve)
    shown = name if len(name) <= 20 else f"{name[:9]}…{name[-10:]}"
    newest = f' <tspan font-weight="normal">{value_text(curve.newest)} {curve.how}</tspan>' if of == "rank" else ""
    return f"{html.escape(shown)}{newest}"


def _end(curve: MetricCurve) -> str:
    if curve.by_step and curve.last_step is not None:
        return f"step {curve.last_step:,}"
    return time_text(curve.whole[-1].x - curve.whole[0].x) if curve.whole else ""
