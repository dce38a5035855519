"""Runs in a table, and beside each other: state, metrics, arguments, and what differs between them, as text and HTML."""

from __future__ import annotations

import difflib
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from string import ascii_uppercase
from typing import NamedTuple, overload

from accelerate_nb.config.run_config import all_settings
from accelerate_nb.events.event_types import Metric
from accelerate_nb.events.run_reader import SavedRun, argument_text, differing_arguments, view_of
from accelerate_nb.events.run_state import SUMMED, RunState, in_order, logged_names
from accelerate_nb.events.terminal_lines import plain
from accelerate_nb.reports import metric_curves
from accelerate_nb.reports.summary import SIGNS
from accelerate_nb.reports.text_format import (
    ago_text,
    aligned,
    counted,
    first_fitting,
    left_out,
    narrowed,
    time_text,
    value_text,
)
from accelerate_nb.sources.run_source import ARGUMENTS, SourcePart, kept_source, values_of

# So many runs are in the table before the others are to be unfolded.
NEWEST = 15
_MOST_METRICS, _MOST_ARGUMENTS = 3, 6
# A column is as wide as what is in it, in characters, up to this; those that share the rest of a page's width have the least.
_NARROWEST, _SHORT, _WIDEST, _WIDEST_ARGUMENT = 10, 14, 40, 14
_WIDTHS = {"progress": 26, "settings": 60, "error": 120}
_NAME_IN_PAGE, _LONGEST_CURVE = 28, 16
# Settings that are columns of their own.
_SHOWN_ALONE = {"num_processes", "name", "tags"}
# Where a page leaves styles out, a row may take several lines.
_STYLE = """<style>
table.accelerate-nb-runs { table-layout: fixed; border-collapse: collapse; margin: 0; width: 100%; }
table.accelerate-nb-runs :is(th, td) { text-align: left !important; white-space: nowrap; overflow: hidden; text-overflow: ellipsis; padding: 3px 6px; }
</style>"""


class _Column(NamedTuple):
    """A column: its head, its cells from the newest run to the oldest, and whether it shares what a page's width leaves."""

    head: str
    cells: tuple[str, ...]
    widest: int = _WIDEST
    is_flexible: bool = False
    # of each cell's element, beside its tooltip
    attributes: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """The characters that its cells may take in a page, with the space between columns."""
        return min(max(map(len, (self.head, *self.cells))), self.widest) + 2


class RunTable(Sequence[SavedRun]):
    """Runs, the newest first: a sequence of what their folders hold, which shows itself as a table."""

    def __init__(self, runs: Iterable[SavedRun]) -> None:
        self._runs = tuple(runs)

    @overload
    def __getitem__(self, index: int) -> SavedRun: ...
    @overload
    def __getitem__(self, index: slice) -> RunTable: ...
    def __getitem__(self, index: int | slice) -> SavedRun | RunTable:
        return type(self)(self._runs[index]) if isinstance(index, slice) else self._runs[index]

    def __len__(self) -> int:
        return len(self._runs)

    def __repr__(self) -> str:
        return "\n".join(table_lines(self._runs)) if self._runs else "There are no runs."

    def _repr_html_(self) -> str:
        return self.html()

    def html(self, element_id: str = "") -> str:
        """The table as HTML, one line a run: the newest runs, and the others folded; a page finds it by `element_id`."""
        return self.html_parts(element_id)[0]

    def html_parts(self, element_id: str = "", opened: int | None = None) -> tuple[str, str]:
        """The table in two parts, as HTML: that down to the run that is opened, and that of the others; all in the first if none is."""
        if not self._runs:
            return "<div>There are no runs.</div>", ""
        # the line of code that shows the panel of a run from its folder, in any notebook
        calls = (f"accelerate_nb.attach({str(run.folder)!r}, panel=True)" for run in self._runs)
        columns = [*_columns(self._runs, time.time()), _Column("to show it", tuple(calls), is_flexible=True)]
        rows = [_html_row(columns, index) for index in range(len(self))]
        named = f' data-runs="{element_id}"' if element_id else ""

        def part(start: int, end: int) -> str:
            head = f"<tr>{''.join(f'<th>{escape(column.head)}</th>' for column in columns)}</tr>"
            newest, others = rows[start : min(end, NEWEST)], rows[max(start, NEWEST) : end]
            tables = [_html_table(columns, [head, *newest] if start == 0 else newest)] if newest else []
            if newest and others:
                # it ends with the run that is opened
                is_open = " open" if end < len(rows) else ""
                summary = f'<summary style="cursor:pointer">show all {len(rows)} runs</summary>'
                tables.append(f"<details{is_open}>{summary}{_html_table(columns, others)}</details>")
            elif others:
                tables.append(_html_table(columns, others))
            return f"<div{named}>{_STYLE}{''.join(tables)}</div>" if tables else ""

        end = len(rows) if opened is None else opened + 1
        return part(0, end), part(end, len(rows))


def table_lines(runs: Sequence[SavedRun]) -> list[str]:
    """The table as lines of text; columns in which nothing stands are left out."""
    columns = _columns(runs, time.time())
    heads = [column.head for column in columns]
    cells = ([_narrowed(cell, _WIDTHS.get(column.head, _WIDEST)) for cell in column.cells] for column in columns)
    return aligned([heads, *zip(*cells, strict=True)])


def _columns(runs: Sequence[SavedRun], now: float) -> list[_Column]:
    """The columns of a table, without those that no run needs to have."""
    clocks = (time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.started)) for run in runs)
    differing = {
        function: differing_arguments(run.arguments for run in runs if run.function == function)
        for function in {run.function: None for run in runs}
    }
    arguments = list(dict.fromkeys(name for names in differing.values() for name in names))[:_MOST_ARGUMENTS]
    names = differing_settings(runs)
    settings = (", ".join(f"{name}={run.settings[name]}" for name in names if name in run.settings) for run in runs)

    def column(head: str, cells: Iterable[str], widest: int = _WIDEST, *, is_flexible: bool = False) -> _Column:
        texts = tuple(_narrowed(plain(text.strip().partition("\n")[0]), 300) for text in cells)
        return _Column(head, texts, widest, is_flexible and max(map(len, texts)) > _SHORT)

    columns = [
        column("", (str(number) for number in range(1, len(runs) + 1))),
        column("when", (ago_text(run.started, now) for run in runs))._replace(
            attributes=tuple(
                f'data-at="{run.started:.0f}" title="{clock}"' for run, clock in zip(runs, clocks, strict=True)
            )
        ),
        column("name", (run.name for run in runs), _NAME_IN_PAGE)._replace(attributes=("data-name",) * len(runs)),
        column("state", map(state_text, runs)),
        column("ranks", (str(run.ranks) for run in runs)),
        column("time", map(lasted, runs)),
    ]
    optional = [
        column("tags", (", ".join(run.tags) for run in runs), is_flexible=True),
        column("progress", map(_progress, runs), is_flexible=True),
        *(
            column(
                name,
                (argument_text(run.arguments, name) if name in differing[run.function] else "" for run in runs),
                _WIDEST_ARGUMENT,
            )
            for name in arguments
        ),
        column("metrics", map(_metrics, runs), is_flexible=True),
        column("curve", map(_curve, runs))._replace(attributes=('style="font-size:75%"',) * len(runs)),
        column("settings", settings, is_flexible=True),
        column("error", (run.error for run in runs), is_flexible=True),
    ]
    return [*columns, *(item for item in optional if any(item.cells))]


def _html_table(columns: Sequence[_Column], rows: Iterable[str]) -> str:
    """A table whose columns are as wide as those of another one with the same columns."""
    widths = "".join(f'<col style="{"" if column.is_flexible else f"width:{column.width}ch"}">' for column in columns)
    full = sum(column.width for column in columns)
    least = sum(min(column.width, _NARROWEST) if column.is_flexible else column.width for column in columns)
    size = f"max-width:{full}ch;min-width:{least}ch"
    return f'<table class="accelerate-nb-runs" style="{size}"><colgroup>{widths}</colgroup>{"".join(rows)}</table>'


def _html_row(columns: Sequence[_Column], index: int) -> str:
    cells = []
    for column in columns:
        text = escape(column.cells[index])
        attributes = [column.attributes[index]] if column.attributes else []
        if len(column.cells[index]) > _NARROWEST and column.head != "when":
            attributes.append(f'title="{text}"')
        cells.append(f"<{' '.join(['td', *attributes])}>{text}</td>")
    return f'<tr data-run="{index}">{"".join(cells)}</tr>\n'


def state_text(run: SavedRun) -> str:
    """The state of a run with its sign, and what is special about it."""
    state = f"{SIGNS[run.state]} {run.state}"
    if run.is_lost:
        state = f"{SIGNS['failed']} lost (was {run.last_state})"
    elif run.stale_since is not None:
        state += f", not heard of for {counted(int((time.time() - run.stale_since) / 86_400), 'day')}"
    elif run.is_detached and not run.is_over:
        state += ", detached"
    if run.restarts:
        state += f", {counted(run.restarts, 'restart')}"
    return state


def differing_settings(runs: Sequence[SavedRun]) -> list[str]:
    """The names of the settings in which these runs differ, but for those with columns of their own; defaults count."""
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in _SHOWN_ALONE)
    return [name for name in names if len({repr(run.settings.get(name)) for run in runs}) > 1]


def lasted(run: SavedRun) -> str:
    """The time that a run took, or has taken so far; empty where its end is not known."""
    if run.is_over and run.ended is None:
        return ""
    return time_text((run.ended or run.stale_since or time.time()) - run.started)


def _progress(run: SavedRun) -> str:
    if run.progress is None:
        return ""
    label, done, total = run.progress
    percent = f" ({100 * done / total:.0f} %)" if total else ""
    return f"{_narrowed(plain(label.strip().partition(chr(10))[0]), 20)} {value_text(done)}/{value_text(total)}{percent}".strip()


def _curve(run: SavedRun) -> str:
    course = "" if run.curve is None else run.curve[1]
    # every second value, or third, up to the newest
    return course[:: -(-(-len(course) // _LONGEST_CURVE) or 1)][::-1]


def _metrics(run: SavedRun) -> str:
    # the one whose curve stands beside them leads
    first = [] if run.curve is None else [run.curve[0]]
    names = dict.fromkeys([*first, *logged_names(run.metrics)])
    known = [name for name in names if name in run.metrics]
    newest = [f"{name} {value_text(run.metrics[name])} {run.metrics_of.get(name, '')}".rstrip() for name in known]
    return ", ".join(newest[:_MOST_METRICS]) + (" …" if len(newest) > _MOST_METRICS else "")


def _narrowed(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 1] + "…"


# ------------------------------------------------------------------------------------------------------------ comparing

# So many runs are told apart by their colours.
MOST_RUNS = 8
_MOST_CURVES = 60
_MOST_DIFF_LINES = 2000


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs beside each other, in the order in which they were named; the first is what the others are compared with."""

    runs: tuple[SavedRun, ...]
    # the name of each setting or argument in which they differ, and its value in each run
    settings: tuple[tuple[str, tuple[str, ...]], ...]
    metrics: tuple[str, ...]
    # of `metrics`; their lines, as the ranks of `overlay`, are runs by index: means over a run's ranks
    curves: tuple[metric_curves.MetricCurve, ...]
    overlay: RunState
    # of each later run of which the source was kept: its letter, and the lines of the unified diff from the first
    diffs: tuple[tuple[str, tuple[str, ...]], ...]

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
    names = tuple(in_order(name for run in series for name in run.series))[:_MOST_CURVES]
    kept = (kept_source(run.folder) for run in runs)
    sources = [[replace(part, origin=plain(part.origin), text=plain(part.text)) for part in parts] for parts in kept]
    return Comparison(
        runs=tuple(runs),
        settings=(*_differing_rows(runs, sources),),
        metrics=names,
        curves=metric_curves.curves_of(series, names, of="run"),
        overlay=overlay,
        diffs=tuple(
            (label, diff_lines(sources[0], source, label))
            for label, source in zip(ascii_uppercase[1:], sources[1:], strict=False)
            if sources[0] and source
        ),
    )


def mean_metrics(view: RunState, started: float, index: int) -> Iterator[Metric]:
    """A run's metrics as those of one rank, `index`: at each step the mean or sum of all, in seconds since the run began."""
    ranks = [view.rank(rank) for rank in view.ranks]
    for name in in_order(name for rank in ranks for name in rank.series):
        of_ranks = metric_curves.series_of(ranks, name)
        every = [metric_curves.sum_of_ranks(of_ranks)] if name in SUMMED else [*of_ranks.values()]
        newest = {metric.step or 0: metric for some in every for metric in some}
        series = [sorted({float(metric.step or 0): metric.value for metric in some}.items()) for some in every]
        for step in sorted(newest):
            # of a rank that reports at other steps, its value there
            values = [value for points in series if (value := metric_curves.value_at(points, step)) is not None]
            mean = sum(value / len(values) for value in values)
            yield Metric(index, name, mean, step, newest[step].time - started)


def diff_lines(first: Sequence[SourcePart], other: Sequence[SourcePart], label: str) -> tuple[str, ...]:
    """The unified diff of the source of run `label` from that of run A, part by part; the numbers of cells are no difference."""
    lines: list[str] = []
    for role in dict.fromkeys(part.role for part in [*first, *other] if part.role != ARGUMENTS):
        old, new = _part(first, role), _part(other, role)
        lines += difflib.unified_diff(
            old.text.splitlines(),
            new.text.splitlines(),
            f"A: {old.origin or 'nothing'}",
            f"{label}: {new.origin or 'nothing'}",
            lineterm="",
        )
    return tuple(lines)


def _part(parts: Sequence[SourcePart], role: str) -> SourcePart:
    return next((part for part in parts if part.role == role), SourcePart(role, "", ""))


def _differing_rows(
    runs: Sequence[SavedRun], sources: Sequence[Sequence[SourcePart]]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The settings and the arguments in which the runs differ, each with its value in each run."""
    defaults = {setting.name: setting.default for setting in all_settings()}
    names = differing_settings(runs)
    if len({repr(run.settings.get("num_processes")) for run in runs}) > 1:
        names = ["num_processes", *names]
    for name in names:
        found = (run.settings.get(name, defaults.get(name)) for run in runs)
        yield name, tuple("default" if value is None else str(value) for value in found)
    arguments = [values_of(_part(source, ARGUMENTS).text) for source in sources]
    for name in dict.fromkeys(name for values in arguments for name in values):
        row = tuple(values.get(name, "none") for values in arguments)
        if len(set(row)) > 1:
            yield name, row


_RUN_HEAD = ("", "run", "tags", "folder", "state", "time", "ranks", "began")
_METRIC_HEAD = ("metric", "run", "min", "max", "last", "difference")
_NO_SOURCE = "No source was kept of both runs."


def comparison_lines(comparison: Comparison) -> list[str]:
    """The comparison: the runs, the settings that differ, the metrics, and the diffs of the source."""
    tables = _tables(comparison)
    parts: list[Sequence[str]] = [aligned([head, *rows]) if rows else [none] for head, rows, none in tables]
    for label, diff in comparison.diffs:
        more = left_out(len(diff), _MOST_DIFF_LINES, "line")
        parts.append([_diff_title(label, diff), *map(plain, diff[:_MOST_DIFF_LINES]), *more])
    if not comparison.diffs:
        parts.append([_NO_SOURCE])
    return [line for part in parts for line in (*part, "")][:-1]


def _tables(comparison: Comparison) -> Iterator[tuple[Sequence[str], list[Sequence[str]], str]]:
    """The head and the rows of each table, and what is said where it has none."""
    runs = []
    for label, run in zip(comparison.labels, comparison.runs, strict=True):
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.started))
        name, tags = narrowed(plain(run.name), 60), ", ".join(run.tags)
        runs.append((label, name, tags, run.folder.name, state_text(run), lasted(run), str(run.ranks), began))
    yield _RUN_HEAD, [*runs], ""
    rows = [(name, *values) for name, values in comparison.settings]
    yield ("setting", *comparison.labels), [*rows], "All settings are the same."
    yield _METRIC_HEAD, [*_metric_rows(comparison)], "No run logged a metric."


def _metric_rows(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    """A row for each metric and run: the metric's name in its first, and how far its last value is from that of the first run."""
    for name in comparison.metrics:
        shown, first = narrowed(plain(name), 60), math.nan
        for index, label in enumerate(comparison.labels):
            values = comparison.overlay.rank(index).series.get(name, ())
            row = ["", "", "", ""]
            if values:
                last = values[-1].value
                finite = [metric.value for metric in values if math.isfinite(metric.value)]
                extremes = [value_text(min(finite)), value_text(max(finite))] if finite else ["", ""]
                row = [*extremes, value_text(last), _difference(first, last) if index else ""]
                first = first if index else last
            yield shown, label, *row
            shown = ""
    every = {name for index in range(len(comparison.runs)) for name in comparison.overlay.rank(index).series}
    for line in left_out(len(in_order(every)), len(comparison.metrics), "metric"):
        yield line, "", "", "", "", ""


def _difference(first: float, last: float) -> str:
    """How far a value is from the first one, also as a part of that; empty where one of them is no number."""
    difference = last - first
    if math.isnan(difference):
        return ""
    sign = "−" if difference < 0 else "+"
    share = difference / first if first else math.nan
    return f"{sign}{value_text(abs(difference))}" + ("" if math.isnan(share) else f" ({sign}{abs(100 * share):.3g} %)")


def _diff_title(label: str, lines: Sequence[str]) -> str:
    return f"The source of {label} {'differs from that of A:' if lines else 'is that of A.'}"


_LEFT = ' style="text-align:left"'
_GAP = ' style="margin:6px 0"'
_DIFF = ' tabindex="0" style="max-height:32em;overflow:auto;margin:4px 0"'
# behind text in the page's own colour
_BACKGROUNDS = {"+": "rgba(46,160,67,.22)", "-": "rgba(248,81,73,.22)"}
_SCALE = 1.5
# What each part may take of a notebook's file, in bytes.
_PICTURES, _TABLE, _DIFF_LINES = 120_000, 40_000, 60_000


def comparison_html(comparison: Comparison, charts_id: str = "") -> str:
    """The comparison as HTML: the runs, which are the curves' legend, settings, curves (`charts_id`), metrics and diffs."""
    parts: list[str] = []
    for head, rows, none in _tables(comparison):
        if head is _METRIC_HEAD and rows:
            drawn = (metric_curves.picture(curve, "run", _SCALE) for curve in comparison.curves)
            pictures = first_fitting(drawn, _PICTURES)
            pictures += left_out(len(comparison.curves), len(pictures), "curve")
            named = f' id="{charts_id}"' if charts_id else ""
            parts.append(f"<div{named}{_GAP}>{' '.join(pictures)}</div>")
        cells = [[*map(escape, row)] for row in rows]
        for index, row in enumerate(cells if head is _RUN_HEAD else ()):
            # a run's letter, with the colour of its lines
            square = f'<span aria-hidden="true" style="color:{metric_curves.COLOURS[index % len(metric_curves.COLOURS)]}">■</span>'
            row[0] = f"{square} <b>{row[0]}</b>"
        lines = [f"<tr>{''.join(f'<th{_LEFT}>{escape(name)}</th>' for name in head)}</tr>"]
        lines += [f"<tr>{''.join(f'<td{_LEFT}>{cell}</td>' for cell in row)}</tr>" for row in cells]
        fitting = first_fitting(lines, _TABLE)
        more = (f"<div>{line}</div>" for line in left_out(len(lines), len(fitting), "row"))
        table = "\n".join(["<table>", *fitting, "</table>", *more])
        parts.append(table if rows else f"<div{_GAP}>{none}</div>")
    for label, diff in comparison.diffs:
        parts.append(f"<div{_GAP}><b>{_diff_title(label, diff)}</b></div>")
        if diff:
            lines = first_fitting(map(_diff_line, diff), _DIFF_LINES)
            lines += left_out(len(diff), len(lines), "line")
            parts.append(f"<pre{_DIFF}>{chr(10).join(lines)}</pre>")
    if not comparison.diffs:
        parts.append(f"<div{_GAP}>{_NO_SOURCE}</div>")
    return "\n".join(parts)


def _diff_line(line: str) -> str:
    text = escape(narrowed(plain(line)))
    if line.startswith(("+++ ", "--- ", "@@")):
        return f"<b>{text}</b>"
    background = _BACKGROUNDS.get(line[:1])
    return f'<span style="background:{background}">{text}</span>' if background else text
