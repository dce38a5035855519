"""A report as plain text, for terminals, screen readers, and wherever HTML is not shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from accelerate_nb.events.model import LogLine
from accelerate_nb.reports.amounts import counted
from accelerate_nb.reports.colours import plain
from accelerate_nb.reports.digest import SIGNS, Digest, Row, Tail, curve_text
from accelerate_nb.reports.failures import Cause
from accelerate_nb.reports.fitting import first_fitting, fitted, narrowed, newest_fitting, saved_size

_WIDEST = 500
_LIVE_LINES = 20
_LAST_LINES = 30  # of each rank, where all of them follow each other unfolded
# What each part may take of a notebook's file, in bytes.
_TABLE, _CURVES, _CALLS, _ENDING = 12_000, 12_000, 8_000, 3_000


def live_text(digest: Digest) -> str:
    """The report while the run goes on."""
    lines = sorted((line for tail in digest.tails for line in tail.lines), key=lambda line: line.time)[-_LIVE_LINES:]
    label = len(digest.tails) > 1
    shown = newest_fitting([_line(line, f"[{line.rank}] " if label else "") for line in lines], 8000)
    return "\n\n".join([*_upper(digest), *(["\n".join(shown)] if shown else [])])


def full_text(digest: Digest, room: int) -> str:
    """The report to keep, of at most `room` bytes of a notebook's file."""
    parts = [*_upper(digest)]
    foot = f"All output: {narrowed(digest.folder, 500)}"
    left = room - sum(saved_size(part) + 10 for part in [*parts, foot])
    return "\n\n".join([*parts, *_tails(digest.tails, left), foot])


def curve_lines(digest: Digest) -> list[str]:
    """A line for each metric: its name, its course, its newest value, its range."""
    rows = [curve_text(curve) for curve in digest.curves]
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of a table as lines, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _upper(digest: Digest) -> Iterator[str]:
    detail = f", {digest.detail}" if digest.detail else ""
    yield f"{digest.head}  {SIGNS[digest.state]} {digest.state}{detail}  {digest.facts}\n{digest.why}"
    if digest.quiet:
        yield fitted(digest.quiet, _ENDING)
    if digest.cause is not None:
        yield "\n".join(cause_lines(digest.cause))
    yield "\n".join(first_fitting(_table(digest), _TABLE))
    if digest.host:
        yield "  ".join(f"{name} {amount}" for name, amount in digest.host)
    if digest.curves:
        more = [f"… {digest.unshown}"] if digest.unshown else []
        yield "\n".join([*first_fitting(curve_lines(digest), _CURVES), *more])


def _table(digest: Digest) -> list[str]:
    """A line for each rank; what no rank has gets no column."""
    head = ["rank", "state", "progress", *digest.columns, "device"]
    rows = [head, *([*_cells(row)] for row in digest.rows)]
    filled = [index for index in range(len(head)) if any(row[index] for row in rows[1:])]
    return aligned([[row[index] for index in filled] for row in rows])


def _cells(row: Row) -> Iterator[str]:
    yield row.ranks
    yield f"{SIGNS[row.state]} {row.state}"
    yield ", ".join(row.progress)
    yield from row.values
    yield ", ".join(row.devices[:4])


def cause_lines(cause: Cause) -> Iterator[str]:
    """Why a run failed: the first cause with its calls, what to do about it, what the other ranks did."""
    yield f"{SIGNS['failed']} {fitted(cause.headline, _ENDING)}"
    yield fitted(cause.text, _CALLS)
    if cause.advice:
        yield fitted(cause.advice, _ENDING)
    if cause.last_lines:
        yield "The last that it wrote:"
        yield from newest_fitting([f"  {line}" for line in cause.last_lines], _ENDING)
    yield from first_fitting(cause.others, _ENDING)


def _tails(tails: Sequence[Tail], room: int) -> Iterator[str]:
    for number, tail in enumerate(tails):
        text = _tail(tail, room // (len(tails) - number) - 200)
        room -= saved_size(text) + 10
        yield text


def _tail(tail: Tail, room: int) -> str:
    shown = newest_fitting([_line(line) for line in tail.lines[-_LAST_LINES:]], room)
    last = counted(tail.count, "line") if len(shown) == tail.count else f"the last {len(shown)} of {tail.count:,} lines"
    return "\n".join([f"rank {tail.rank}: {last}", *shown])


def _line(line: LogLine, label: str = "  ") -> str:
    return label + narrowed(plain(line.text), _WIDEST)
