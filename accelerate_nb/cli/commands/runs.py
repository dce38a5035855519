"""`accelerate-nb runs`: past and present runs, their logs and their reports."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from accelerate_nb.cli.runs.compare import show_comparison
from accelerate_nb.cli.runs.find import every_run, found_run, runs_folder
from accelerate_nb.cli.runs.logs import show_logs
from accelerate_nb.cli.runs.prune import remove_runs
from accelerate_nb.cli.runs.report import show_report

if TYPE_CHECKING:
    from accelerate_nb.events.run_reader import SavedRun

_NEWEST = 15
_LINES = 20
_RUN = "A number of the list (1 is the newest), a name or the beginning of one, a run's folder, or 'last' (default)."


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.set_defaults(act=_list, rank=None, follow=False, html=None, open=False, lines=_LINES, run="last", runs=())
    _add_listing(parser)
    commands = parser.add_subparsers(title="what is done", metavar="WHAT")
    _add_listing(_command(commands, "list", "List runs, the newest first (the default).", _list))
    logs = _command(commands, "logs", "Show the last lines that ranks wrote.", show_logs)
    logs.add_argument("--rank", type=int, metavar="N", help="Show this rank's lines only.")
    logs.add_argument("--lines", type=int, metavar="N", help=f"Number of lines of each rank (default: {_LINES}).")
    logs.add_argument("-f", "--follow", action="store_true", help="Print new lines until the run is over.")
    show = _command(commands, "show", "Show a run's report.", show_report)
    show.add_argument("--html", metavar="FILE", help="Write the report as HTML into this file.")
    show.add_argument("--open", action="store_true", help="Open the report in a browser.")
    compare = _command(commands, "compare", "Compare runs: settings, metrics and source.", show_comparison)
    compare.add_argument(
        "runs", metavar="RUN", nargs="+", help="The runs, each as for `show`; the first is compared with."
    )
    compare.add_argument("--html", metavar="FILE", help="Write a page with overlaid curves into this file.")
    _add_folder(compare)
    attach = _command(commands, "attach", "Show the output of a run live; an interrupt leaves the run alone.", _attach)
    stop = _command(commands, "stop", "Stop a detached run after a step that all ranks share.", _stop)
    stop.add_argument("--kill", action="store_true", default=False, help="Kill its ranks at once.")
    stop.add_argument(
        "--timeout", type=float, metavar="SECONDS", default=None, help="Interrupt the ranks after this time."
    )
    prune = _command(commands, "prune", "Remove the folders of runs that are over.", remove_runs)
    prune.add_argument(
        "runs", metavar="RUN", nargs="*", help="The runs to remove; without any, those that the flags choose."
    )
    prune.add_argument(
        "--keep", type=int, metavar="N", default=None, help="Keep the newest N runs, and remove the others."
    )
    prune.add_argument(
        *("--older-than", "--older_than"),
        type=float,
        metavar="DAYS",
        default=None,
        help="Remove runs that began before.",
    )
    prune.add_argument(
        *("--dry-run", "--dry_run"), action="store_true", default=False, help="Print what would be removed."
    )
    _add_folder(prune)
    path = _command(commands, "path", "Print the folder in which a run's output is kept.", _path)
    for item in (logs, show, path, attach, stop):
        item.add_argument("run", metavar="RUN", nargs="?", help=_RUN)
        _add_folder(item)


def run(arguments: argparse.Namespace) -> int:
    """Do it; gives the exit code."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        # what this terminal can't print is written in ASCII
        reconfigure(errors="backslashreplace")
    act: Callable[[argparse.Namespace], int] = arguments.act
    code = act(arguments)
    # a reader that has gone is met here, and not when Python ends
    sys.stdout.flush()
    return code


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    word: str,
    help_text: str,
    act: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    # a flag that is not given after the command keeps its value from before it
    parser = commands.add_parser(word, help=help_text, description=help_text, argument_default=argparse.SUPPRESS)
    parser.set_defaults(act=act)
    return parser


def _add_listing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--all", action="store_true", help=f"List all runs that are kept, not only the newest {_NEWEST}."
    )
    parser.add_argument("--json", action="store_true", help="Write a list of objects in JSON.")
    _add_folder(parser)


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--folder",
        metavar="PATH",
        help="The parent folder of the runs' folders; without it, that of the setting `folder`.",
    )


# ---------------------------------------------------------------------------------------------------------------- listing


def _list(arguments: argparse.Namespace) -> int:
    every = every_run(arguments.folder)
    shown = every if arguments.all else every[:_NEWEST]
    if arguments.json:
        facts = [{"number": number, **asdict(run), "folder": str(run.folder)} for number, run in enumerate(shown, 1)]
        print(json.dumps(facts, indent=1))
    elif not every:
        print(f"There are no runs in {runs_folder(arguments.folder)}.")
    else:
        print("\n".join(_table(shown)))
        if more := len(every) - len(shown):
            print(f"… and {more} more; --all lists them")
    return 0


def _table(runs: Sequence[SavedRun]) -> list[str]:
    from accelerate_nb.events.terminal_lines import within
    from accelerate_nb.reports.history.run_table import table_lines

    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return [line if columns is None else within(line, columns - 1) for line in table_lines(runs)]


def _path(arguments: argparse.Namespace) -> int:
    print(found_run(arguments).folder)
    return 0


# ------------------------------------------------------------------------------------------------------- attaching, ending


def _attach(arguments: argparse.Namespace) -> int:
    from accelerate_nb.cli.launching import detached

    return detached.attach(found_run(arguments))


def _stop(arguments: argparse.Namespace) -> int:
    from accelerate_nb.cli.launching import detached

    return detached.stop(found_run(arguments), kill=arguments.kill, timeout=arguments.timeout)
