"""`accelerate-nb runs`: past and present runs, their logs and their reports."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate_nb.errors import ConfigurationError

if TYPE_CHECKING:
    from accelerate_nb.events.run_reader import LogFollower, SavedRun
    from accelerate_nb.events.run_state import RunState
    from accelerate_nb.reports.run_info import RunFacts

_NEWEST = 20
_LINES = 20
_POLL_INTERVAL = 0.2
_RUN = "A number of the list (1 is the newest), a name or the beginning of one, a run's folder, or 'last' (default)."
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body {{ font: 14px system-ui, sans-serif; margin: 1.5em; }} td {{ padding: 1px 10px 1px 0; vertical-align: top; }}</style>
</head><body>
{body}
</body></html>
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.set_defaults(act=_list, rank=None, follow=False, html=None, open=False, lines=_LINES, run="last", runs=())
    _add_listing(parser)
    commands = parser.add_subparsers(title="what is done", metavar="WHAT")
    _add_listing(_command(commands, "list", "List runs, the newest first (the default).", _list))
    logs = _command(commands, "logs", "Show the last lines that ranks wrote.", _logs)
    logs.add_argument("--rank", type=int, metavar="N", help="Show this rank's lines only.")
    logs.add_argument("--lines", type=int, metavar="N", help=f"Number of lines of each rank (default: {_LINES}).")
    logs.add_argument("-f", "--follow", action="store_true", help="Print new lines until the run is over.")
    show = _command(commands, "show", "Show a run's report.", _show)
    show.add_argument("--html", metavar="FILE", help="Write the report as HTML into this file.")
    show.add_argument("--open", action="store_true", help="Open the report in a browser.")
    attach = _command(commands, "attach", "Show the output of a run live; an interrupt leaves the run alone.", _attach)
    stop = _command(commands, "stop", "Stop a detached run after a step that all ranks share.", _stop)
    stop.add_argument("--kill", action="store_true", default=False, help="Kill its ranks at once.")
    stop.add_argument(
        "--timeout", type=float, metavar="SECONDS", default=None, help="Interrupt the ranks after this time."
    )
    prune = _command(commands, "prune", "Remove the folders of runs that are over.", _prune)
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
    every = _every(arguments.folder)
    shown = every if arguments.all else every[:_NEWEST]
    if arguments.json:
        facts = [{"number": number, **asdict(run), "folder": str(run.folder)} for number, run in enumerate(shown, 1)]
        print(json.dumps(facts, indent=1))
    elif not every:
        print(f"There are no runs in {_runs_folder(arguments.folder)}.")
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


# ---------------------------------------------------------------------------------------------------------------- finding


def _runs_folder(folder: str | None) -> Path:
    from accelerate_nb.config.runs_folder import configured_runs_folder

    return configured_runs_folder(os.environ, folder)


def _every(folder: str | None) -> list[SavedRun]:
    from accelerate_nb.events.run_reader import kept_runs

    return kept_runs(_runs_folder(folder))


def _found(arguments: argparse.Namespace) -> SavedRun:
    """The requested run."""
    from accelerate_nb.events.find_run import find_run

    return find_run(arguments.run, _runs_folder(arguments.folder))


def _path(arguments: argparse.Namespace) -> int:
    print(_found(arguments).folder)
    return 0


# ------------------------------------------------------------------------------------------------------- attaching, ending


def _attach(arguments: argparse.Namespace) -> int:
    from accelerate_nb.cli.launching import detached

    return detached.attach(_found(arguments))


def _stop(arguments: argparse.Namespace) -> int:
    from accelerate_nb.cli.launching import detached

    return detached.stop(_found(arguments), kill=arguments.kill, timeout=arguments.timeout)


def _prune(arguments: argparse.Namespace) -> int:
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
        named = [find_run(word, _runs_folder(arguments.folder)) for word in arguments.runs]
        if going_on := [item.folder.name for item in named if not item.is_over]:
            raise ConfigurationError(
                f"{', '.join(going_on)} should be removed, but goes on. `accelerate-nb runs stop` ends a detached run."
            )
        return named
    if arguments.keep is None and arguments.older_than is None:
        raise ConfigurationError("No run was named. Name runs, or choose them with --keep N or --older-than DAYS.")
    every = _every(arguments.folder)
    beyond = every[max(arguments.keep or 0, 0) :]
    latest = time.time() - 86_400 * (arguments.older_than or 0.0)
    return [item for item in beyond if item.is_over and item.started <= latest]


# ------------------------------------------------------------------------------------------------------------------- logs


def _logs(arguments: argparse.Namespace) -> int:
    from accelerate_nb.events.run_reader import LogFollower, rank_logs

    found = _found(arguments)
    if arguments.rank is not None and not 0 <= arguments.rank < found.ranks:
        raise ConfigurationError(
            f"--rank {arguments.rank} was requested, but {found.folder.name} has ranks 0 to {found.ranks - 1}. Name one of them."
        )
    wanted = range(found.ranks) if arguments.rank is None else [arguments.rank]
    label = "[{}] " if len(wanted) > 1 else ""
    followers = [LogFollower(rank, found.folder, max(arguments.lines, 0)) for rank in wanted]
    _write_new(followers, label)
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
        _write_new(followers, label)


def _write_new(followers: Sequence[LogFollower], label: str) -> None:
    from accelerate_nb.events.terminal_lines import cleaned
    from accelerate_nb.reports.ansi import plain

    for follower in followers:
        for line in follower.new():
            text = cleaned(line, None) if sys.stdout.isatty() else plain(line)
            sys.stdout.write(f"{label.format(follower.rank)}{text}\n")
    sys.stdout.flush()


# ----------------------------------------------------------------------------------------------------------------- report


def _show(arguments: argparse.Namespace) -> int:
    from accelerate_nb.events.run_reader import view_of

    found = _found(arguments)
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
    from html import escape

    from accelerate_nb.reports.report import static

    body = static(_facts(run), view, live=False)["text/html"]
    try:
        path.write_text(_PAGE.format(title=escape(f"{run.name}: {view.state}"), body=body), encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"The report was to be written into {path}, which can't be done: {error.strerror}. Name another file."
        ) from None
