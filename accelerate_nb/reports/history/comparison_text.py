"""A comparison of runs as plain text."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

from accelerate_nb.events.run_reader import SavedRun
from accelerate_nb.events.terminal_lines import plain
from accelerate_nb.reports.history.comparison import Comparison, MetricSpan
from accelerate_nb.reports.history.run_table import lasted, state_text
from accelerate_nb.reports.text_format import aligned, narrowed, value_text

RUN_HEAD = ("", "run", "tags", "folder", "state", "time", "ranks", "began")
METRIC_HEAD = ("metric", "run", "min", "max", "last", "difference")
NO_SETTINGS = "All settings are the same."
NO_METRICS = "No run logged a metric."
NO_SOURCE = "No source was kept of both runs."


def comparison_lines(comparison: Comparison) -> list[str]:
    """The comparison: the runs, the settings that differ, the metrics, and the diffs of the source."""
    return [line for part in _parts(comparison) for line in (*part, "")][:-1]


def run_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """A row for each run."""
    return [_run_row(label, run) for label, run in zip(comparison.labels, comparison.runs, strict=True)]


def metric_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """A row for each metric and run, with the metric's name in its first."""
    return [row for name, spans in comparison.metrics for row in _metric_rows(name, spans, comparison.labels)]


def diff_title(label: str, is_same: bool) -> str:
    """The heading of the source of a later run."""
    return f"The source of {label} is that of A." if is_same else f"The source of {label} differs from that of A:"


def _parts(comparison: Comparison) -> Iterator[Sequence[str]]:
    yield aligned([RUN_HEAD, *run_rows(comparison)])
    if comparison.settings:
        yield aligned([("setting", *comparison.labels), *((name, *values) for name, values in comparison.settings)])
    else:
        yield [NO_SETTINGS]
    yield aligned([METRIC_HEAD, *metric_rows(comparison)]) if comparison.metrics else [NO_METRICS]
    for diff in comparison.diffs:
        yield [diff_title(diff.label, not diff.lines), *map(plain, diff.lines)]
    if not comparison.diffs:
        yield [NO_SOURCE]


def _run_row(label: str, run: SavedRun) -> tuple[str, ...]:
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.started))
    name, tags = narrowed(plain(run.name), 60), ", ".join(run.tags)
    return label, name, tags, run.folder.name, state_text(run), lasted(run), str(run.ranks), began


def _metric_rows(name: str, spans: Sequence[MetricSpan | None], labels: str) -> Iterator[tuple[str, ...]]:
    shown = narrowed(plain(name), 60)
    for label, span in zip(labels, spans, strict=True):
        if span is None:
            yield shown, label, "", "", "", ""
        else:
            low, high = ("" if math.isnan(value) else value_text(value) for value in (span.low, span.high))
            yield shown, label, low, high, value_text(span.last), _difference(span)
        shown = ""


def _difference(span: MetricSpan) -> str:
    if math.isnan(span.difference):
        return ""
    sign = "−" if span.difference < 0 else "+"
    share = "" if math.isnan(span.share) else f" ({sign}{abs(100 * span.share):.3g} %)"
    return f"{sign}{value_text(abs(span.difference))}{share}"
