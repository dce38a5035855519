"""`accelerate-nb runs show`: the report of a run, as text or as a page."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate_nb.cli.runs.find import found_run
from accelerate_nb.cli.runs.html_page import write_page

if TYPE_CHECKING:
    from accelerate_nb.events.run_reader import SavedRun
    from accelerate_nb.events.run_state import RunState
    from accelerate_nb.reports.run_info import RunFacts


def show_report(arguments: argparse.Namespace) -> int:
    """Print the report of a run, or write it as a page; gives the exit code."""
    from accelerate_nb.events.run_reader import view_of

    found = found_run(arguments)
    view = view_of(found)
    if arguments.html is None and not arguments.open:
        print("\n".join(_report(found, view)))
        return 0
    path = Path(arguments.html).expanduser() if arguments.html is not None else found.folder / "report.html"
    _write_page(found, view, path)
    print(path)
    if arguments.open:
        import webbrowser

        webbrowser.open(path.absolute().as_uri())
    return 0


def _report(run: SavedRun, view: RunState) -> Iterator[str]:
    """The report that a notebook keeps as text; a failure of no rank is above it."""
    from accelerate_nb.reports.ansi import plain
    from accelerate_nb.reports.report import static

    if run.error and not view.failures:
        yield plain(run.error)
        yield ""
    yield static(_facts(run), view, live=False)["text/plain"]


def _facts(run: SavedRun) -> RunFacts:
    from accelerate_nb.reports.run_info import RunFacts

    return RunFacts(run.name, run.why, str(run.folder), run.started, run.ranks, host="", can_act=False)


def _write_page(run: SavedRun, view: RunState, path: Path) -> None:
    from accelerate_nb.reports.report import static

    write_page(path, f"{run.name}: {view.state}", static(_facts(run), view, live=False)["text/html"])
