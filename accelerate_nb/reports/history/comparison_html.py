"""A comparison of runs as HTML that needs neither scripts nor a network, legible on light and on dark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from accelerate_nb.events.terminal_lines import plain
from accelerate_nb.reports.history.comparison import Comparison, SourceDiff
from accelerate_nb.reports.history.comparison_text import (
    METRIC_HEAD,
    NO_METRICS,
    NO_SETTINGS,
    NO_SOURCE,
    RUN_HEAD,
    diff_title,
    metric_rows,
    run_rows,
)
from accelerate_nb.reports.metric_curves import COLOURS, picture
from accelerate_nb.reports.text_format import first_fitting, narrowed

_LEFT = ' style="text-align:left"'
_GAP = ' style="margin:6px 0"'
_DIFF = ' tabindex="0" style="max-height:32em;overflow:auto;margin:4px 0"'
# behind text in the page's own colour
_BACKGROUNDS = {"+": "rgba(46,160,67,.22)", "-": "rgba(248,81,73,.22)"}
_SCALE = 1.5
# What each part may take of a notebook's file, in bytes.
_PICTURES, _TABLE, _DIFF_LINES = 120_000, 40_000, 60_000


def comparison_html(comparison: Comparison, charts_id: str = "") -> str:
    """
    The comparison: the runs, which are the legend of the curves, the settings that differ, curves, metrics and diffs.

    The element of the curves has the id `charts_id`.
    """
    return "\n".join(_parts(comparison, charts_id))


def _parts(comparison: Comparison, charts_id: str) -> Iterator[str]:
    yield _table(RUN_HEAD, ([_key(i, row[0]), *map(escape, row[1:])] for i, row in enumerate(run_rows(comparison))))
    if comparison.settings:
        rows = ([escape(cell) for cell in (name, *values)] for name, values in comparison.settings)
        yield _table(("setting", *comparison.labels), rows)
    else:
        yield f"<div{_GAP}>{NO_SETTINGS}</div>"
    if comparison.metrics:
        pictures = (picture(curve, "run", _SCALE) for curve in comparison.curves)
        named = f' id="{charts_id}"' if charts_id else ""
        yield f"<div{named}{_GAP}>{' '.join(first_fitting(pictures, _PICTURES))}</div>"
        yield _table(METRIC_HEAD, ([escape(cell) for cell in row] for row in metric_rows(comparison)))
    else:
        yield f"<div{_GAP}>{NO_METRICS}</div>"
    for diff in comparison.diffs:
        yield _diff(diff)
    if not comparison.diffs:
        yield f"<div{_GAP}>{NO_SOURCE}</div>"


def _key(index: int, label: str) -> str:
    """A run's letter, with the colour of its lines."""
    colour = COLOURS[index % len(COLOURS)]
    return f'<span aria-hidden="true" style="color:{colour}">■</span> <b>{label}</b>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"<tr>{''.join(f'<th{_LEFT}>{escape(name)}</th>' for name in head)}</tr>"]
    lines += [f"<tr>{''.join(f'<td{_LEFT}>{cell}</td>' for cell in row)}</tr>" for row in rows]
    return "<table>\n" + "\n".join(first_fitting(lines, _TABLE)) + "\n</table>"


def _diff(diff: SourceDiff) -> str:
    title = f"<div{_GAP}><b>{diff_title(diff.label, not diff.lines)}</b></div>"
    if not diff.lines:
        return title
    lines = first_fitting(map(_diff_line, diff.lines), _DIFF_LINES)
    return f"{title}\n<pre{_DIFF}>{chr(10).join(lines)}</pre>"


def _diff_line(line: str) -> str:
    text = escape(narrowed(plain(line)))
    if line.startswith(("+++ ", "--- ", "@@")):
        return f"<b>{text}</b>"
    background = _BACKGROUNDS.get(line[:1])
    return f'<span style="background:{background}">{text}</span>' if background else text
