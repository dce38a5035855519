"""`accelerate-nb runs compare`: runs beside each other, as text or as a page."""

from __future__ import annotations

import argparse
from pathlib import Path

from accelerate_nb.cli.runs.find import runs_folder
from accelerate_nb.cli.runs.html_page import write_page


def show_comparison(arguments: argparse.Namespace) -> int:
    """Print the comparison of the requested runs, or write it as a page; gives the exit code."""
    from accelerate_nb.events.find_run import find_runs
    from accelerate_nb.reports.history.comparison import MOST_RUNS, compare
    from accelerate_nb.reports.history.comparison_html import comparison_html
    from accelerate_nb.reports.history.comparison_text import comparison_lines

    comparison = compare(find_runs(arguments.runs, runs_folder(arguments.folder), MOST_RUNS))
    if arguments.html is not None:
        path = Path(arguments.html).expanduser()
        write_page(path, ", ".join(run.name for run in comparison.runs), comparison_html(comparison))
        print(path)
        return 0
    print("\n".join(comparison_lines(comparison)))
    return 0
