"""`accelerate-nb runs compare`: runs beside each other, as text or as a page."""

from __future__ import annotations

import argparse

from accelerate_nb.cli.runs.find import runs_folder


def show_comparison(arguments: argparse.Namespace) -> int:
    """Print the comparison of the requested runs; gives the exit code."""
    from accelerate_nb.events.find_run import find_runs
    from accelerate_nb.reports.history.comparison import MOST_RUNS, compare
    from accelerate_nb.reports.history.comparison_text import comparison_lines

    comparison = compare(find_runs(arguments.runs, runs_folder(arguments.folder), MOST_RUNS))
    print("\n".join(comparison_lines(comparison)))
    return 0
