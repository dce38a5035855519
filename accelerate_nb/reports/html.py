"""A report as HTML that means the same where scripts, styles or pictures are taken away."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape

from accelerate_nb.events.model import LogLine, Meaning
from accelerate_nb.reports.ansi import as_html
from accelerate_nb.reports.failure_summary import FailureCause
from accelerate_nb.reports.number_format import counted
from accelerate_nb.reports.profile_table import COLUMNS, ProfileTable
from accelerate_nb.reports.size_limits import first_fitting, fitted, narrowed, newest_fitting, saved_size
from accelerate_nb.reports.summary import SIGNS, LogTail, RunSummary, SummaryRow, curve_cells
from accelerate_nb.reports.svg_chart import picture

_STATE_COLOURS = {
    "starting": "#7f7f7f",
    "running": "#3b82c4",
    "stopping": "#a97000",
    "finished": "#2e8b3d",
    "failed": "#d13438",
    "stopped": "#a97000",
}
_NUMBER = re.compile(r"(?:(?:step )?[-+\d.,e]+(?: (?:s|ms|µs)|%| (?:mean|sum) of \d+)?)?")
_BLOCKS = re.compile("[█▁-▇░]+")
_LEFT = ' style="text-align:left"'
_PRE = ' style="max-height:24em;overflow:auto;margin:4px 0"'
# a column in reverse begins at its end: the newest lines are seen first
_LOG = ' style="max-height:24em;overflow:auto;margin:4px 0;display:flex;flex-direction:column-reverse"'
_UNSCROLLED = 16  # lines that are lower than that
_GAP = ' style="margin:6px 0"'
_IDLE_WARNING = ' style="color:#7f7f7f"'
# What lines of logs mean, in mid-tones.
_COLOURS: dict[Meaning, str] = {"error": "#d13438", "warning": "#b5682a", "bar": "#767676"}
_WIDEST = 1000
_LIVE_LINES = 20
# What each part may take of a notebook's file, in bytes.
_TABLE, _CURVES, _PICTURES, _CALLS, _EVERY, _NOTES = 40_000, 25_000, 60_000, 14_000, 10_000, 6_000


def live_html(digest: RunSummary) -> str:
    """The report while the run goes on: what is new last, nothing that a reader could unfold."""
    parts = [*_upper(digest, _PICTURES // 2)]
    lines = sorted((line for tail in digest.tails for line in tail.lines), key=lambda line: line.time)[-_LIVE_LINES:]
    if lines:
        label = "[{}] " if len(digest.tails) > 1 else ""
        shown = newest_fitting([*map(str, range(len(lines)))], 20_000, lambda n: _line(lines[int(n)], label))
        parts.append(f"<pre>{chr(10).join(shown)}</pre>")
    return "\n".join(parts)


def full_html(digest: RunSummary, size_limit: int) -> str:
    """The report to keep, of at most `size_limit` bytes of a notebook's file."""
    parts = [*_upper(digest, _PICTURES)]
    foot = [f"<div{_IDLE_WARNING}>All output: {escape(narrowed(digest.folder, 500))}</div>"] if digest.folder else []
    left = size_limit - sum(map(saved_size, [*parts, *foot]))
    return "\n".join([*parts, *_tails(digest, left), *foot])


def _upper(digest: RunSummary, pictures: int) -> Iterator[str]:
    """All but the logs."""
    yield _head(digest)
    if digest.restarts:
        yield f"<div{_GAP}>{'<br>'.join(map(escape, digest.restarts))}</div>"
    if digest.idle_warning:
        yield f"<pre>{escape(fitted(digest.idle_warning, 6000, escape))}</pre>"
    if digest.cause is not None:
        yield from _cause(digest.cause)
    yield _table(digest)
    if digest.step_causes:
        yield f"<div{_GAP}>{'<br>'.join(map(escape, digest.step_causes))}</div>"
    if digest.profile is not None:
        yield _profile(digest.profile)
    if digest.host:
        amounts = " &nbsp; ".join(f"{escape(name)} {escape(amount)}" for name, amount in digest.host)
        yield f"<div{_GAP}>{amounts}</div>"
    if digest.curves:
        yield _curves(digest)
        if drawn := first_fitting(map(picture, digest.pictures), pictures):
            pictures_html = "\n".join(drawn)
            yield f"<div{_GAP}>\n{pictures_html}\n</div>"


def _head(digest: RunSummary) -> str:
    detail = f", {escape(digest.detail)}" if digest.detail else ""
    return (
        f"<div><b>{escape(digest.head)}</b> &nbsp; {_state(digest.state)}{detail} &nbsp; {escape(digest.facts)}</div>\n"
        f"<div{_IDLE_WARNING}>{escape(digest.why)}</div>"
    )


def _state(state: str) -> str:
    return f'<b style="color:{_STATE_COLOURS[state]}">{SIGNS[state]} {state}</b>'


# ---------------------------------------------------------------------------------------------------------------- tables


def _table(digest: RunSummary) -> str:
    """A row for each rank; what no rank has gets no column."""
    nodes = any(row.node for row in digest.rows)
    progress = any(row.progress for row in digest.rows)
    devices = any(row.devices for row in digest.rows)
    steps = any(row.steps for row in digest.rows)
    names = [
        *(["node"] if nodes else []),
        "rank",
        "state",
        *(["progress"] if progress else []),
        *map(escape, digest.columns),
        *(["device"] if devices else []),
    ]
    names += ["step"] if steps else []
    return _as_table(names, [[*_cells(row, nodes, progress, devices, steps)] for row in digest.rows], _TABLE)


def _cells(row: SummaryRow, nodes: bool, progress: bool, devices: bool, steps: bool) -> Iterator[str]:
    if nodes:
        yield escape(row.node)
    yield escape(row.ranks)
    yield _state(row.state)
    if progress:
        yield "<br>".join(_coloured(escape(bar)) for bar in row.progress)
    yield from map(escape, row.values)
    if devices:
        yield "<br>".join(map(escape, row.devices[:4]))
    if steps:
        yield escape(row.steps)


def _curves(digest: RunSummary) -> str:
    names = ("metric", "over time", "min", "max", "last", "")
    rows = [[_coloured(escape(part)) for part in curve_cells(curve)] for curve in digest.curves]
    more = f"\n<div>… {escape(digest.unshown)}</div>" if digest.unshown else ""
    return _as_table(names, rows, _CURVES) + more


def _profile(profile: ProfileTable) -> str:
    table = _as_table(COLUMNS, [[*map(escape, row)] for row in profile.rows], _TABLE) if profile.rows else ""
    trace = f"<div{_IDLE_WARNING}>Its trace, for Perfetto: {escape(profile.trace)}</div>" if profile.trace else ""
    return "\n".join(filter(None, (f"<div{_GAP}>{escape(profile.head)}</div>", table, trace)))


def _coloured(text: str) -> str:
    """Blocks of a bar or a curve in the colour of what runs."""
    return _BLOCKS.sub(f'<span style="color:{_STATE_COLOURS["running"]}">\\g<0></span>', text)


def _as_table(names: Sequence[str], rows: Sequence[Sequence[str]], size_limit: int) -> str:
    """The first of these rows that fit, under their names; numbers stand as the page aligns them, all else to the left."""
    styles = ["" if all(map(_NUMBER.fullmatch, column)) else _LEFT for column in zip(*rows, strict=True)]
    written = (_row(cells, styles) for cells in ([f"<b>{name}</b>" for name in names], *rows))
    return "<table>\n" + "\n".join(first_fitting(written, size_limit)) + "\n</table>"


def _row(cells: Sequence[str], styles: Sequence[str]) -> str:
    # a line for each cell: in a changed report only the lines of changed cells differ
    lines = "\n".join(f"<td{style}>{cell}</td>" for cell, style in zip(cells, styles, strict=True))
    return f"<tr>\n{lines}\n</tr>"


# ----------------------------------------------------------------------------------------------------------------- error


def _cause(cause: FailureCause) -> Iterator[str]:
    headline = fitted(cause.headline, 3000, escape)
    yield f'<div{_GAP}><b style="color:{_STATE_COLOURS["failed"]}">{SIGNS["failed"]} {escape(headline)}</b></div>'
    yield f"<pre{_PRE}>{escape(fitted(cause.text, _CALLS, escape))}</pre>"
    if cause.advice:
        yield f"<div><b>{escape(fitted(cause.advice, _NOTES, escape))}</b></div>"
    if cause.last_lines:
        last = newest_fitting(cause.last_lines, _NOTES, escape)
        yield f"<div>Its last lines:</div>\n<pre>{chr(10).join(last)}</pre>"
    if others := first_fitting(map(escape, cause.others), _NOTES):
        yield f"<div>{'<br>'.join(others)}</div>"
    if cause.every:
        title = "all calls" if cause.rank is not None else "every rank's stack"
        every = escape(fitted("\n".join(cause.every), _EVERY, escape))
        yield _folded(title, f"<pre{_PRE}>{every}</pre>")


# ------------------------------------------------------------------------------------------------------------------ logs


def _tails(digest: RunSummary, size_limit: int) -> Iterator[str]:
    """The last lines of each rank, which share `size_limit`."""
    unfolded = digest.cause.rank if digest.cause is not None else digest.tails[0].rank if digest.tails else 0
    for number, tail in enumerate(digest.tails):
        share = size_limit // (len(digest.tails) - number)
        text = _tail(tail, share - 300, is_open=tail.rank == unfolded)
        size_limit -= saved_size(text)
        yield text


def _tail(tail: LogTail, size_limit: int, *, is_open: bool) -> str:
    lines = list(tail.lines)
    shown = newest_fitting([*map(str, range(len(lines)))], size_limit, lambda n: _line(lines[int(n)]))
    last = counted(tail.count, "line") if len(shown) == tail.count else f"the last {len(shown)} of {tail.count:,} lines"
    style = _LOG if len(shown) > _UNSCROLLED else ""
    return _folded(
        f"rank {tail.rank}: {last}", f"<pre{style}><span>{chr(10).join(shown)}</span></pre>", is_open=is_open
    )


def _line(line: LogLine, label: str = "") -> str:
    text = label.format(line.rank) + as_html(narrowed(line.text, _WIDEST))
    colour = _COLOURS.get(line.meaning)
    return f'<span style="color:{colour}">{text}</span>' if colour else text


def _folded(title: str, html: str, *, is_open: bool = False) -> str:
    opened = " open" if is_open else ""
    return f"<details{opened}><summary>{escape(title)}</summary>{html}</details>"
