"""A report as plain text, for terminals, screen readers, and wherever HTML is not shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from accelerate_nb.events.model import LogLine
from accelerate_nb.events.terminal_lines import plain
from accelerate_nb.reports.failure_summary import FailureCause
from accelerate_nb.reports.number_format import counted
from accelerate_nb.reports.profile_table import COLUMNS, ProfileTable
from accelerate_nb.reports.size_limits import first_fitting, fitted, narrowed, newest_fitting, saved_size
from accelerate_nb.reports.summary import SIGNS, LogTail, RunSummary, SummaryRow, curve_text

_WIDEST = 500
_LIVE_LINES = 20
_LAST_LINES = 30  # of each rank, where all of them follow each other unfolded
# What each part may take of a notebook's file, in bytes.
_TABLE, _CURVES, _CALLS, _NOTES = 12_000, 12_000, 8_000, 3_000


def live_text(digest: RunSummary) -> str:
    """The report while the run goes on."""
    lines = sorted((line for tail in digest.tails for line in tail.lines), key=lambda line: line.time)[-_LIVE_LINES:]
    label = len(digest.tails) > 1
    shown = newest_fitting([_line(line, f"[{line.rank}] " if label else "") for line in lines], 8000)
    return "\n\n".join([*_upper(digest), *(["\n".join(shown)] if shown else [])])


def full_text(digest: RunSummary, size_limit: int) -> str:
    """The report to keep, of at most `size_limit` bytes of a notebook's file."""
    parts = [*_upper(digest)]
    foot = [f"All output: {narrowed(digest.folder, 500)}"] if digest.folder else []
    left = size_limit - sum(saved_size(part) + 10 for part in [*parts, *foot])
    return "\n\n".join([*parts, *_tails(digest.tails, left), *foot])


def curve_lines(digest: RunSummary) -> list[str]:
    """A line for each metric: its name, its course, its lowest, highest and newest value."""
    return aligned([*map(curve_text, digest.curves)])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of a table as lines, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _upper(digest: RunSummary) -> Iterator[str]:
    detail = f", {digest.detail}" if digest.detail else ""
    yield f"{digest.head}  {SIGNS[digest.state]} {digest.state}{detail}  {digest.facts}\n{digest.why}"
    if digest.restarts:
        yield "\n".join(digest.restarts)
    if digest.idle_warning:
        yield fitted(digest.idle_warning, _NOTES)
    if digest.cause is not None:
        yield "\n".join(cause_lines(digest.cause))
    yield "\n".join(first_fitting(_table(digest), _TABLE))
    if digest.step_causes:
        yield "\n".join(digest.step_causes)
    if digest.profile is not None:
        yield "\n".join(_profile_lines(digest.profile))
    if digest.host:
        yield "  ".join(f"{name} {amount}" for name, amount in digest.host)
    if digest.curves:
        more = [f"… {digest.unshown}"] if digest.unshown else []
        yield "\n".join([*first_fitting(curve_lines(digest), _CURVES), *more])


def _table(digest: RunSummary) -> list[str]:
    """A line for each rank; what no rank has gets no column."""
    head = ["node", "rank", "state", "progress", *digest.columns, "device", "step"]
    rows = [head, *([*_cells(row)] for row in digest.rows)]
    filled = [index for index in range(len(head)) if any(row[index] for row in rows[1:])]
    return aligned([[row[index] for index in filled] for row in rows])


def _profile_lines(profile: ProfileTable) -> list[str]:
    trace = [f"Its trace, for Perfetto: {profile.trace}"] if profile.trace else []
    return [profile.head, *(aligned([COLUMNS, *profile.rows]) if profile.rows else []), *trace]


def _cells(row: SummaryRow) -> Iterator[str]:
    yield row.node
    yield row.ranks
    yield f"{SIGNS[row.state]} {row.state}"
    yield ", ".join(row.progress)
    yield from row.values
    yield ", ".join(row.devices[:4])
    yield row.steps


def cause_lines(cause: FailureCause) -> Iterator[str]:
    """The lines on a failure: the first cause with its calls, what to do about it, what the other ranks did."""
    yield f"{SIGNS['failed']} {fitted(cause.headline, _NOTES)}"
    yield fitted(cause.text, _CALLS)
    if cause.advice:
        yield fitted(cause.advice, _NOTES)
    if cause.last_lines:
        yield "Its last lines:"
        yield from newest_fitting([f"  {line}" for line in cause.last_lines], _NOTES)
    yield from first_fitting(cause.others, _NOTES)


def _tails(tails: Sequence[LogTail], size_limit: int) -> Iterator[str]:
    for number, tail in enumerate(tails):
        text = _tail(tail, size_limit // (len(tails) - number) - 200)
        size_limit -= saved_size(text) + 10
        yield text


def _tail(tail: LogTail, size_limit: int) -> str:
    shown = newest_fitting([_line(line) for line in tail.lines[-_LAST_LINES:]], size_limit)
    last = counted(tail.count, "line") if len(shown) == tail.count else f"the last {len(shown)} of {tail.count:,} lines"
    return "\n".join([f"rank {tail.rank}: {last}", *shown])


def _line(line: LogLine, label: str = "  ") -> str:
    return label + narrowed(plain(line.text), _WIDEST)
