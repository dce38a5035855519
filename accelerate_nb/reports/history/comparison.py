"""Runs compared: the settings, the metrics and the source in which they differ."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from string import ascii_uppercase
from typing import Any

from msgspec import structs

from accelerate_nb.config.run_config import all_settings
from accelerate_nb.events.metric_names import SUMMED, in_order
from accelerate_nb.events.model import Metric
from accelerate_nb.events.rank_state import RankState
from accelerate_nb.events.run_reader import SavedRun, view_of
from accelerate_nb.events.run_state import RunState
from accelerate_nb.events.terminal_lines import plain
from accelerate_nb.reports.history.run_table import differing_settings
from accelerate_nb.reports.metric_curves import MetricCurve, curves_of, series_of, sum_of_ranks, value_at
from accelerate_nb.sources.call_arguments import values_of
from accelerate_nb.sources.run_source import ARGUMENTS, SourcePart, kept_source

# So many runs are told apart by their colours.
MOST_RUNS = 8
_MOST_METRICS = 60
_MOST_DIFF_LINES = 2000


@dataclass(frozen=True, slots=True)
class MetricSpan:
    """The values of a metric in one run; `difference` is from the last value of the first run, `nan` where there is none."""

    low: float
    high: float
    last: float
    difference: float = math.nan
    # the difference as a part of the first run's value
    share: float = math.nan


@dataclass(frozen=True, slots=True)
class SourceDiff:
    """The unified diff of the source of a later run from that of the first; `lines` are empty where they are the same."""

    label: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """
    Runs beside each other, in the order in which they were named; the first is what the others are compared with.

    `settings` holds the name of a setting, or of an argument of the function or script, and its value in each run, `metrics` a metric's name and its span in each run. The lines
    of `curves` are runs, by their index, as the ranks of `overlay` are: means over a run's ranks. `diffs` has an entry for each
    later run of which the source was kept.
    """

    runs: tuple[SavedRun, ...]
    settings: tuple[tuple[str, tuple[str, ...]], ...]
    metrics: tuple[tuple[str, tuple[MetricSpan | None, ...]], ...]
    curves: tuple[MetricCurve, ...]
    overlay: RunState
    diffs: tuple[SourceDiff, ...]

    @property
    def labels(self) -> str:
        """The letter of each run."""
        return ascii_uppercase[: len(self.runs)]


def compare(runs: Sequence[SavedRun]) -> Comparison:
    """Read the folders of these runs, and compare all of them with the first."""
    overlay = RunState(len(runs))
    for index, run in enumerate(runs):
        for metric in mean_metrics(view_of(run), run.started, index):
            overlay.apply(metric)
    series = [overlay.rank(index) for index in range(len(runs))]
    names = tuple(in_order(name for run in series for name in run.series))[:_MOST_METRICS]
    sources = [
        [replace(part, origin=plain(part.origin), text=plain(part.text)) for part in kept_source(run.folder)]
        for run in runs
    ]
    return Comparison(
        runs=tuple(runs),
        settings=(*_setting_rows(runs), *_argument_rows(sources)),
        metrics=tuple((name, metric_spans(name, series)) for name in names),
        curves=curves_of(series, names, of="run"),
        overlay=overlay,
        diffs=tuple(
            SourceDiff(label, diff_lines(sources[0], source, "A", label))
            for label, source in zip(ascii_uppercase[1:], sources[1:], strict=False)
            if sources[0] and source
        ),
    )


def mean_metrics(view: RunState, started: float, index: int) -> Iterator[Metric]:
    """
    The metrics of a run as those of one rank, `index`: at each step the mean or the sum of all ranks, in seconds since the run began.

    Where values have no step, they are those of the first rank that logged them.
    """
    ranks = [view.rank(rank) for rank in view.ranks]
    for name in in_order(name for rank in ranks for name in rank.series):
        every = series_of(ranks, name)
        yield from _means([sum_of_ranks(every)] if name in SUMMED else [*every.values()], started, index)


def metric_spans(name: str, series: Sequence[RankState]) -> tuple[MetricSpan | None, ...]:
    """The span of a metric in each run, and how far its last value is from that of the first run."""
    found = [_span(run.series.get(name, ())) for run in series]
    first = found[0]
    if first is None:
        return tuple(found)
    return (first, *(None if span is None else _from(first, span) for span in found[1:]))


def diff_lines(
    first: Sequence[SourcePart], other: Sequence[SourcePart], first_label: str, other_label: str
) -> tuple[str, ...]:
    """The unified diff of two sources, part by part; the numbers of cells are no difference."""
    lines: list[str] = []
    for role in dict.fromkeys(part.role for part in [*first, *other] if part.role != ARGUMENTS):
        old, new = _part(first, role), _part(other, role)
        lines += difflib.unified_diff(
            old.text.splitlines(),
            new.text.splitlines(),
            f"{first_label}: {old.origin or 'nothing'}",
            f"{other_label}: {new.origin or 'nothing'}",
            lineterm="",
        )
    if len(lines) > _MOST_DIFF_LINES:
        lines[_MOST_DIFF_LINES:] = [f"… {len(lines) - _MOST_DIFF_LINES:,} more lines"]
    return tuple(lines)


def _part(parts: Sequence[SourcePart], role: str) -> SourcePart:
    return next((part for part in parts if part.role == role), SourcePart(role, "", ""))


def _setting_rows(runs: Sequence[SavedRun]) -> Iterator[tuple[str, tuple[str, ...]]]:
    defaults = {setting.name: setting.default for setting in all_settings()}
    names = differing_settings(runs)
    if len({repr(run.settings.get("num_processes")) for run in runs}) > 1:
        names = ["num_processes", *names]
    for name in names:
        yield name, tuple(_value_text(run.settings.get(name, defaults.get(name))) for run in runs)


def _argument_rows(sources: Sequence[Sequence[SourcePart]]) -> Iterator[tuple[str, tuple[str, ...]]]:
    every = [values_of(_part(source, ARGUMENTS).text) for source in sources]
    for name in dict.fromkeys(name for values in every for name in values):
        row = tuple(values.get(name, "none") for values in every)
        if len(set(row)) > 1:
            yield name, row


def _value_text(value: Any) -> str:
    return "default" if value is None else str(value)


def _means(every: Sequence[Sequence[Metric]], started: float, index: int) -> Iterator[Metric]:
    if any(metric.step is None for some in every for metric in some):
        yield from (structs.replace(metric, rank=index, time=metric.time - started) for metric in every[0])
        return
    newest = {metric.step or 0: metric for some in every for metric in some}
    series = [sorted({float(metric.step or 0): metric.value for metric in some}.items()) for some in every]
    for step in sorted(newest):
        # of a rank that reports at other steps, its value there
        values = [value for points in series if (value := value_at(points, step)) is not None]
        mean = sum(value / len(values) for value in values)
        yield Metric(index, newest[step].name, mean, step, newest[step].time - started)


def _span(values: Sequence[Metric]) -> MetricSpan | None:
    if not values:
        return None
    finite = [metric.value for metric in values if math.isfinite(metric.value)]
    return MetricSpan(min(finite, default=math.nan), max(finite, default=math.nan), values[-1].value)


def _from(first: MetricSpan, span: MetricSpan) -> MetricSpan:
    difference = span.last - first.last
    share = difference / abs(first.last) if first.last else math.nan
    return MetricSpan(span.low, span.high, span.last, difference, share)
