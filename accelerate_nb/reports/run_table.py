"""A table of runs: when, what, its state, how far it is, its newest metrics, the arguments and settings in which runs differ."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple, overload

from accelerate_nb.events.run_reader import SavedRun, argument_text, differing_arguments
from accelerate_nb.events.run_state import logged_names
from accelerate_nb.events.terminal_lines import plain
from accelerate_nb.reports.summary import SIGNS
from accelerate_nb.reports.text_format import ago_text, aligned, counted, time_text, value_text

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
