"""`accelerate-nb runs logs`: the lines that ranks wrote."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate_nb.cli.runs.find import found_run
from accelerate_nb.errors import ConfigurationError

if TYPE_CHECKING:
    from accelerate_nb.events.run_reader import LogFollower, SavedRun

_POLL_INTERVAL = 0.2


def show_logs(arguments: argparse.Namespace) -> int:
    """Print the last lines of a run's ranks, and with `--follow` those that come; gives the exit code."""
    from accelerate_nb.events.run_reader import LogFollower, rank_logs

    found = found_run(arguments)
    if arguments.rank is not None and not 0 <= arguments.rank < found.ranks:
        raise ConfigurationError(
            f"--rank {arguments.rank} was requested, but {found.folder.name} has ranks 0 to {found.ranks - 1}. Name one of them."
        )
    wanted = range(found.ranks) if arguments.rank is None else [arguments.rank]
    label = "[{}] " if len(wanted) > 1 else ""
    most = max(arguments.lines, 0)
    followers = [LogFollower(rank, found.folder, most) for rank in wanted]
    for follower in followers:
        _write(follower.rank, _without_gaps(follower.rank, follower.new(), found.folder, most), label)
    if not arguments.follow and not any(rank in rank_logs(found.folder) for rank in wanted):
        print(f"nothing was written; the run's folder is {found.folder}", file=sys.stderr)
    if arguments.follow:
        _follow(found, followers, label)
    return 0


def _follow(run: SavedRun, followers: Sequence[LogFollower], label: str) -> None:
    from accelerate_nb.events.run_reader import kept_run

    is_over = run.is_over
    while not is_over:
        time.sleep(_POLL_INTERVAL)
        # first the state, then the lines: what was written before the end is not missed
        now = kept_run(run.folder)
        is_over = now is None or now.is_over
        for follower in followers:
            _write(follower.rank, follower.new(), label)


def _without_gaps(rank: int, lines: list[str], folder: Path, most: int) -> list[str]:
    """The last lines of a rank; where some of them are left out in the run's folder, those of its whole log, which may be on another machine."""
    from accelerate_nb.events.run_reader import last_lines
    from accelerate_nb.launching.detached.log_request import requested_log
    from accelerate_nb.launching.node_agent.fetched_logs import is_gap

    if not any(map(is_gap, lines)):
        return lines
    whole = requested_log(folder, rank)
    if whole is not None:
        _, lines, _ = last_lines(whole, most)
    if any(map(is_gap, lines)):
        print(
            f"Parts of what rank {rank} wrote are left out; each gap names the file that holds all of it. In the notebook that launched the run, "
            f"run.logs({rank}) fetches it.",
            file=sys.stderr,
        )
    return lines


def _write(rank: int, lines: Sequence[str], label: str) -> None:
    from accelerate_nb.events.terminal_lines import cleaned, plain

    for line in lines:
        text = cleaned(line, None) if sys.stdout.isatty() else plain(line)
        sys.stdout.write(f"{label.format(rank)}{text}\n")
    sys.stdout.flush()
