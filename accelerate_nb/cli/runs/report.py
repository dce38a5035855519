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
    from accelerate_nb.events.terminal_lines import plain

    if run.error and not view.failures:
        yield plain(run.error)
        yield ""
    yield _static(run, view)["text/plain"]


def _static(run: SavedRun, view: RunState) -> dict[str, str]:
    from accelerate_nb.reports.report import static
    from accelerate_nb.reports.run_info import RunFacts

    return static(RunFacts.of_saved(run), view, live=False)


def _write_page(run: SavedRun, view: RunState, path: Path) -> None:
    write_page(path, f"{run.name}: {view.state}", _static(run, view)["text/html"])
