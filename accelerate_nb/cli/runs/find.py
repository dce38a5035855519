"""The runs that a command line names."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accelerate_nb.events.run_reader import SavedRun


def runs_folder(folder: str | None) -> Path:
    """The parent folder of the runs' folders."""
    from accelerate_nb.config.runs_folder import configured_runs_folder

    return configured_runs_folder(os.environ, folder)


def every_run(folder: str | None) -> list[SavedRun]:
    """All runs that are kept, the newest first."""
    from accelerate_nb.events.run_reader import kept_runs

    return kept_runs(runs_folder(folder))


def found_run(arguments: argparse.Namespace) -> SavedRun:
    """The requested run."""
    from accelerate_nb.events.find_run import find_run

    return find_run(arguments.run, runs_folder(arguments.folder))
