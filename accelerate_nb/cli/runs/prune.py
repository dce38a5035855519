"""`accelerate-nb runs prune`: the folders of runs are removed."""

from __future__ import annotations

import argparse
import shutil
import time
from typing import TYPE_CHECKING

from accelerate_nb.cli.runs.find import every_run, runs_folder
from accelerate_nb.errors import ConfigurationError

if TYPE_CHECKING:
    from accelerate_nb.events.run_reader import SavedRun


def remove_runs(arguments: argparse.Namespace) -> int:
    """Remove the requested runs' folders; gives the exit code."""
    chosen = _to_remove(arguments)
    for item in chosen:
        if arguments.dry_run:
            print(f"would remove {item.folder}")
            continue
        shutil.rmtree(item.folder)
        print(f"removed {item.folder}")
    if not chosen:
        print("There is nothing to remove.")
    return 0


def _to_remove(arguments: argparse.Namespace) -> list[SavedRun]:
    """The requested runs; those that go on are refused by name, and passed over where flags choose."""
    from accelerate_nb.events.find_run import find_run

    if arguments.runs:
        named = [find_run(word, runs_folder(arguments.folder)) for word in arguments.runs]
        if going_on := [item.folder.name for item in named if not item.is_over]:
            raise ConfigurationError(
                f"{', '.join(going_on)} should be removed, but goes on. `accelerate-nb runs stop` ends a detached run."
            )
        return named
    if arguments.keep is None and arguments.older_than is None:
        raise ConfigurationError("No run was named. Name runs, or choose them with --keep N or --older-than DAYS.")
    every = every_run(arguments.folder)
    beyond = every[max(arguments.keep or 0, 0) :]
    latest = time.time() - 86_400 * (arguments.older_than or 0.0)
    return [item for item in beyond if item.is_over and item.started <= latest]
