"""A table of runs: when, what, its state, how far it is, its newest metrics, the settings in which runs differ."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import overload

from accelerate_nb.events.metric_names import logged_names
from accelerate_nb.events.run_reader import SavedRun
from accelerate_nb.reports.ansi import plain
from accelerate_nb.reports.number_format import counted, time_text, value_text
from accelerate_nb.reports.summary import SIGNS
from accelerate_nb.reports.text import aligned

_HEAD = ("", "when", "name", "state", "ranks", "time", "progress", "curve", "metrics", "settings", "error")
_WIDEST_NAME, _WIDEST_ERROR, _WIDEST_SETTINGS = 40, 120, 60
_MOST_METRICS = 3
_LEFT = ' style="text-align:left"'


class RunTable(Sequence[SavedRun]):
    """
    Runs, the newest first: a sequence of what their folders say of them, which shows itself as a table.

    >>> runs()[0].state
    'running'
    """

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
        """The table as HTML, as an element with this id."""
        if not self._runs:
            return "<div>There are no runs.</div>"
        named = f' id="{element_id}"' if element_id else ""
        head, *rows = _columns([*_HEAD, "to show it"], ((*row, show_call(run)) for row, run in _rows(self._runs)))
        body = "".join(f"<tr>{''.join(f'<td{_LEFT}>{escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
        return f"<table{named}><tr>{''.join(f'<th{_LEFT}>{name}</th>' for name in head)}</tr>\n{body}</table>"


def show_call(run: SavedRun) -> str:
    """The line of code that shows the panel of a run from its folder, in any notebook."""
    return f"accelerate_nb.attach({str(run.folder)!r}, panel=True)"


def table_lines(runs: Sequence[SavedRun]) -> list[str]:
    """The table as lines of text; columns in which nothing stands are left out."""
    return aligned(_columns(_HEAD, (row for row, _ in _rows(runs))))


def _rows(runs: Sequence[SavedRun]) -> Iterator[tuple[tuple[str, ...], SavedRun]]:
    names = differing_settings(runs)
    for number, run in enumerate(runs, 1):
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.started))
        name, error = _one_line(run.name, _WIDEST_NAME), _one_line(run.error, _WIDEST_ERROR)
        row = (str(number), when, name, state_text(run), str(run.ranks), lasted(run), _progress(run))
        curve = "" if run.curve is None else run.curve[1]
        yield (*row, curve, _metrics(run), _settings(run, names), error), run


def state_text(run: SavedRun) -> str:
    """The state of a run with its sign, and what is special about it."""
    state = f"{SIGNS[run.state]} {run.state}"
    if run.is_lost:
        state = f"{SIGNS['failed']} lost (was {run.last_state})"
    elif run.is_detached and not run.is_over:
        state += ", detached"
    if run.restarts:
        state += f", {counted(run.restarts, 'restart')}"
    return state


def differing_settings(runs: Sequence[SavedRun]) -> list[str]:
    """
    The names of the settings in which these runs differ; where a run does not have one, its default counts.

    The number of processes is left out: it is a column of its own.
    """
    names = dict.fromkeys(name for run in runs for name in run.settings if name != "num_processes")
    return [name for name in names if len({repr(run.settings.get(name)) for run in runs}) > 1]


def _columns(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """The table without those of its columns that no run needs to have."""
    every = [tuple(head), *map(tuple, rows)]
    optional = {"progress", "curve", "metrics", "settings"}
    kept = [index for index, name in enumerate(head) if name not in optional or any(row[index] for row in every[1:])]
    return [tuple(row[index] for index in kept) for row in every]


def lasted(run: SavedRun) -> str:
    """The time that a run took, or has taken so far; empty where its end is not known."""
    if run.is_over and run.ended is None:
        return ""
    return time_text((run.ended or time.time()) - run.started)


def _progress(run: SavedRun) -> str:
    if run.progress is None:
        return ""
    label, done, total = run.progress
    percent = f" ({100 * done / total:.0f} %)" if total else ""
    return f"{_one_line(label, 20)} {value_text(done)}/{value_text(total)}{percent}".strip()


def _settings(run: SavedRun, names: Sequence[str]) -> str:
    chosen = [f"{name}={run.settings[name]}" for name in names if name in run.settings]
    return _one_line(", ".join(chosen), _WIDEST_SETTINGS)


def _metrics(run: SavedRun) -> str:
    # the one whose curve stands beside them leads
    first = [] if run.curve is None else [run.curve[0]]
    names = dict.fromkeys([*first, *logged_names(run.metrics)])
    newest = [
        f"{name} {value_text(run.metrics[name])} {run.metrics_of.get(name, '')}".rstrip()
        for name in names
        if name in run.metrics
    ]
    return ", ".join(newest[:_MOST_METRICS]) + (" …" if len(newest) > _MOST_METRICS else "")


def _one_line(text: str, width: int) -> str:
    line = plain(text.strip().partition("\n")[0])
    return line if len(line) <= width else line[: width - 1] + "…"
