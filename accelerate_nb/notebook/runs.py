"""The functions that find runs again, those that outlive their notebook and those that are over, and their tables."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from accelerate_nb.config.hf_files import configured_runs_folder
from accelerate_nb.events.run_reader import RunName, SavedRun, find_run, find_runs, kept_runs
from accelerate_nb.launching.detached.control import RemoteConductor
from accelerate_nb.launching.run import Run
from accelerate_nb.notebook.display import select
from accelerate_nb.notebook.display.message_feed import MOST_POINTS, series_rows
from accelerate_nb.notebook.display.run_display import frontend_state
from accelerate_nb.notebook.display.select import display_settings, display_way
from accelerate_nb.notebook.host import host
from accelerate_nb.reports.run_table import MOST_RUNS, Comparison, RunTable, compare, comparison_html, comparison_lines


class ListedRuns(RunTable):
    """Runs, the newest first, as `runs()` gives them; where widgets work, the rows of their table open them."""

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        table = ""
        if self and _shows_widgets():
            from accelerate_nb.notebook.display.run_browser import RunBrowser

            browser = RunBrowser(self, host(os.environ).service or "jupyter")
            frontend_state().keep(browser)
            table = browser.element_id
        return {"text/plain": repr(self), "text/html": self.html(table)}


@dataclass(frozen=True, slots=True, repr=False)
class ComparedRuns:
    """Runs beside each other, as HTML where a notebook shows it, otherwise as text; where widgets work, the curves are the panel's charts."""

    comparison: Comparison

    def __repr__(self) -> str:
        return "\n".join(comparison_lines(self.comparison))

    def _repr_html_(self) -> str:
        identity = "\0".join(f"{run.folder}\0{run.state}" for run in self.comparison.runs)
        charts_id = "accelerate-nb-runs-" + hashlib.sha256(identity.encode(errors="replace")).hexdigest()[:12]
        if self.comparison.metrics and _shows_widgets():
            from accelerate_nb.notebook.display.run_browser import ComparisonWidget

            rows = list(series_rows(self.comparison.overlay, MOST_POINTS))
            message = {"seq": 1, "reset": True, "names": list(self.comparison.labels), "metrics": rows}
            frontend_state().keep(ComparisonWidget(charts=charts_id, message=message))
        return comparison_html(self.comparison, charts_id)


def _shows_widgets() -> bool:
    return display_way(display_settings(), host(os.environ)) == "panel"


@overload
def runs(*, folder: str | os.PathLike[str] | None = None) -> RunTable: ...
@overload
def runs(first: RunName, /, *, folder: str | os.PathLike[str] | None = None) -> RunTable: ...
@overload
def runs(
    first: RunName, second: RunName, /, *more: RunName, folder: str | os.PathLike[str] | None = None
) -> ComparedRuns: ...
def runs(*names: RunName, folder: str | os.PathLike[str] | None = None) -> RunTable | ComparedRuns:
    """
    All runs that are kept, the newest first: a table in a notebook, and a sequence of `SavedRun`. With names: these runs compared.

    In JupyterLab and Notebook a press on a row opens the run under it: its panel.

    Two to eight runs are compared by overlaid curves, the settings and metrics that differ, and the diff of their source.
    A name is a run's number in the table, its name or the beginning of it, or its folder. `folder` is the parent of the runs'
    folders; without it, the one that the setting `folder` names, or that in the user's cache.

    Raises `ConfigurationError` where a name means no run, or several.

    >>> runs()
    >>> runs()[0].folder
    >>> runs("2", "1")
    """
    __tracebackhide__ = True  # IPython shows the user's own frames alone
    if len(names) == 1 and folder is None and not isinstance(names[0], int):
        # the parent of the runs' folders, as the only argument was until there were names
        return ListedRuns(kept_runs(_parent(names[0])))
    if names:
        return compared_runs(names, folder)
    return ListedRuns(kept_runs(_parent(folder)))


def compared_runs(names: Sequence[RunName], folder: str | os.PathLike[str] | None = None) -> ComparedRuns:
    """The comparison of the runs of these names; raises `ConfigurationError` where a name means none, or several."""
    __tracebackhide__ = True
    return ComparedRuns(compare(find_runs(names, _parent(folder), MOST_RUNS)))


def attach(
    run: RunName | SavedRun | Run | None = None,
    *,
    panel: bool | str | None = None,
    report: str | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> Run:
    """
    The `Run` that goes on in another process: one that was launched with `detach=True`, from this notebook or another.

    `run` is a run's folder, its name or number in `runs()`, one of `runs()` itself, or nothing for the newest one that is
    detached. The panel comes back with everything that has happened meanwhile; `wait()`, `stop()`, `stacks()`, `logs()`, `results`
    and errors are those of the run that `launch` gave. Several processes may attach at once, and an interrupt of `wait()` leaves the run alone. A run that
    is over can be attached to for its panel and its results. A run that is not detached can be watched, and stopped only where it was launched.

    `panel` is that of `launch`, `folder` that of `runs`; `report` has no effect any more.

    Raises `ConfigurationError` where there is no such run.

    >>> run = attach()
    >>> run.wait()
    """
    __tracebackhide__ = True  # IPython shows the user's own frames alone
    config = select.display_settings(panel, report)
    if isinstance(run, Run):
        run = run.folder
    found = run if isinstance(run, SavedRun) else _found(run, _parent(folder))
    front_end = select.front_end(config, os.environ)
    attached = Run(RemoteConductor(found), front_end).start()
    if panel is True or select.shows_at_once(front_end):
        attached.follow()
    return attached


def _found(run: RunName | None, parent: Path) -> SavedRun:
    __tracebackhide__ = True
    if run is not None:
        return find_run(run, parent)
    every = kept_runs(parent)
    detached = [item for item in every if item.is_detached]
    going_on = [item for item in detached if not item.is_over and item.stale_since is None]
    for candidates in (going_on, detached):
        if candidates:
            return candidates[0]
    return find_run("last", parent)


def _parent(folder: str | os.PathLike[str] | None) -> Path:
    return configured_runs_folder(os.environ, folder)
