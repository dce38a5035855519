"""`accelerate-nb runs`: past and present runs, their logs and their reports."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate_nb.cli.exit_codes import waited_for
from accelerate_nb.errors import ConfigurationError

if TYPE_CHECKING:
    from accelerate_nb.events.run_reader import SavedRun

_PROG = "accelerate-nb runs"
_NEWEST = 15
_LINES = 20
_POLL_INTERVAL = 0.2
_RUN = "A number of the list (1 is the newest), a name or the beginning of one, a run's folder, or 'last' (default)."

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>:root {{ color-scheme: light dark; }} body {{ background: Canvas; color: CanvasText; }} h1 {{ font-size: 1.3em; }} body {{ font: 14px system-ui, sans-serif; margin: 1.5em; }} td, th {{ padding: 1px 10px 1px 0; vertical-align: top; }}</style>
</head><body><main>
<h1>{title}</h1>
{body}
</main></body></html>
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.set_defaults(act=_list, rank=None, follow=False, html=None, open=False, lines=_LINES, run="last", runs=())
    _add_listing(parser)
    commands = parser.add_subparsers(title="what is done", metavar="WHAT")
    _add_listing(_command(commands, "list", "List runs, the newest first (the default).", _list))
    logs = _command(commands, "logs", "Show the last lines that ranks wrote.", _show_logs)
    logs.add_argument("--rank", type=int, metavar="N", help="Show this rank's lines only.")
    logs.add_argument("--lines", type=int, metavar="N", help=f"Number of lines of each rank (default: {_LINES}).")
    logs.add_argument("-f", "--follow", action="store_true", help="Print new lines until the run is over.")
    show = _command(commands, "show", "Show a run's report.", _show_report)
    show.add_argument("--html", metavar="FILE", help="Write the report as HTML into this file.")
    show.add_argument("--open", action="store_true", help="Open the report in a browser.")
    compare = _command(commands, "compare", "Compare runs: settings, metrics and source.", _show_comparison)
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
    prune = _command(commands, "prune", "Remove the folders of runs that are over.", _remove_runs)
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


def _runs_folder(folder: str | None) -> Path:
    """The parent folder of the runs' folders."""
    from accelerate_nb.config.hf_files import configured_runs_folder

    return configured_runs_folder(os.environ, folder)


def _found_run(arguments: argparse.Namespace) -> SavedRun:
    """The requested run."""
    from accelerate_nb.events.run_reader import find_run

    return find_run(arguments.run, _runs_folder(arguments.folder))


def _list(arguments: argparse.Namespace) -> int:
    from accelerate_nb.events.run_reader import kept_runs
    from accelerate_nb.events.terminal_lines import within
    from accelerate_nb.reports.run_table import table_lines

    every = kept_runs(_runs_folder(arguments.folder))
    shown = every if arguments.all else every[:_NEWEST]
    if arguments.json:
        facts = [{"number": number, **asdict(run), "folder": str(run.folder)} for number, run in enumerate(shown, 1)]
        print(json.dumps(facts, indent=1))
    elif not every:
        print(f"There are no runs in {_runs_folder(arguments.folder)}.")
    else:
        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        for line in table_lines(shown):
            print(line if columns is None else within(line, columns - 1))
        if more := len(every) - len(shown):
            print(f"… and {more} more; --all lists them")
    return 0


def _path(arguments: argparse.Namespace) -> int:
    print(_found_run(arguments).folder)
    return 0


# ------------------------------------------------------------------------------------------------------- attaching, ending


def _attach(arguments: argparse.Namespace) -> int:
    """Show a run's output from its last lines on until it is over; gives its exit code."""
    from accelerate_nb.launching.detached.control import RemoteConductor
    from accelerate_nb.launching.run import Run
    from accelerate_nb.notebook.display.text import TextFrontEnd

    saved, front_end = _found_run(arguments), TextFrontEnd(is_command=True)
    try:
        return waited_for(Run(RemoteConductor(saved), front_end), front_end, _PROG)
    except KeyboardInterrupt:
        print(f"{saved.name} goes on. `{_PROG} attach {saved.folder.name}` shows it again.", file=sys.stderr)
        return 0


def _stop(arguments: argparse.Namespace) -> int:
    """Stop a detached run, and wait until it has ended; gives the exit code."""
    from accelerate_nb.events.run_folder import shown_path
    from accelerate_nb.launching.detached.control import RemoteConductor
    from accelerate_nb.launching.run import FrontEnd, Run

    saved = _found_run(arguments)
    if saved.is_over:
        print(f"{saved.name} is over: {saved.state}.")
        return 0
    if not saved.is_detached:
        raise ConfigurationError(
            f"{saved.folder.name} was to be stopped, and it is not detached: it belongs to the notebook or the terminal that "
            "launched it. Stop it there, or launch with --detach."
        )
    run = Run(RemoteConductor(saved), FrontEnd()).start()
    if arguments.kill:
        run.request_stop("kill")
        run.wait_until_over(arguments.timeout)
    else:
        run.stop(arguments.timeout)
    if not run.done:
        print(f"{_PROG}: {saved.name} has not ended yet.", file=sys.stderr)
        return 1
    detail = f", {run.view.detail}" if run.view.detail else ""
    print(f"{saved.name} {run.view.state}{detail}. All output: {shown_path(saved.folder)}")
    return 0


# ----------------------------------------------------------------------------------------------------- lines of ranks


def _show_logs(arguments: argparse.Namespace) -> int:
    """Print the last lines of a run's ranks, and with `--follow` those that come; gives the exit code."""
    from accelerate_nb.events.run_reader import LogFollower, kept_run, rank_logs
    from accelerate_nb.launching.node_agent.node_logs import is_gap
    from accelerate_nb.notebook.display.text import standard_sink
    from accelerate_nb.notebook.display.text_output import LabelledLine

    found = _found_run(arguments)
    if arguments.rank is not None and not 0 <= arguments.rank < found.ranks:
        raise ConfigurationError(
            f"--rank {arguments.rank} was requested, but {found.folder.name} has ranks 0 to {found.ranks - 1}. Name one of them."
        )
    wanted = range(found.ranks) if arguments.rank is None else [arguments.rank]
    sink, is_over = standard_sink(), False

    def write_new(follower: LogFollower) -> None:
        lines = [(sink.clean(line, "stdout"), line) for line in follower.new()]
        label = f"[{follower.rank}] " if len(wanted) > 1 else ""
        sink.write([LabelledLine("stdout", text, "", label, (follower.rank,)) for text, _ in lines])
        if any(is_gap(line) for _, line in lines):
            text = f"Parts of what rank {follower.rank} wrote are left out; each gap names the node and the file on it that holds all of it."
            sink.write([LabelledLine("stderr", text)])

    followers = [LogFollower(rank, found.folder, max(arguments.lines, 0)) for rank in wanted]
    for follower in followers:
        write_new(follower)
    if not arguments.follow and not any(rank in rank_logs(found.folder) for rank in wanted):
        print(f"nothing was written; the run's folder is {found.folder}", file=sys.stderr)
    while arguments.follow and not is_over:
        # first the state, then the lines: what was written before the end is not missed
        now = kept_run(found.folder)
        is_over = now is None or now.is_over
        time.sleep(0 if is_over else _POLL_INTERVAL)
        for follower in followers:
            write_new(follower)
    return 0


# ------------------------------------------------------------------------------------------------------------ reports


def _show_report(arguments: argparse.Namespace) -> int:
    """Print the report of a run, as a notebook keeps it, or write it as a page; gives the exit code."""
    from accelerate_nb.events.run_folder import shown_path
    from accelerate_nb.events.run_reader import view_of
    from accelerate_nb.events.terminal_lines import plain
    from accelerate_nb.reports.report import run_report
    from accelerate_nb.reports.summary import RunFacts

    found = _found_run(arguments)
    view = view_of(found)
    # nobody can act on it
    facts = RunFacts(
        found.name, found.why, shown_path(found.folder), found.started, found.ranks, "", can_act=False, tags=found.tags
    )
    report = run_report(facts, view)
    if arguments.html is None and not arguments.open:
        # a failure of no rank stands above it
        if found.error and not view.failures:
            print(f"{plain(found.error)}\n")
        print(report["text/plain"])
        return 0
    path = Path(arguments.html).expanduser() if arguments.html is not None else found.folder / "report.html"
    _write_page(path, f"{found.name}: {view.state}", report["text/html"])
    print(path)
    if arguments.open:
        import webbrowser

        webbrowser.open(path.absolute().as_uri())
    return 0


def _show_comparison(arguments: argparse.Namespace) -> int:
    """Print the comparison of the requested runs, or write it as a page; gives the exit code."""
    from accelerate_nb.events.run_reader import find_runs
    from accelerate_nb.reports.run_table import MOST_RUNS, compare, comparison_html, comparison_lines

    comparison = compare(find_runs(arguments.runs, _runs_folder(arguments.folder), MOST_RUNS))
    if arguments.html is not None:
        path = Path(arguments.html).expanduser()
        _write_page(path, ", ".join(run.name for run in comparison.runs), comparison_html(comparison))
        print(path)
        return 0
    print("\n".join(comparison_lines(comparison)))
    return 0


def _write_page(path: Path, title: str, body: str) -> None:
    """Write a page; raises `ConfigurationError` where the file can't be written."""
    from html import escape

    try:
        path.write_text(_PAGE.format(title=escape(title), body=body), encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"The report was to be written into {path}, which can't be done: {error.strerror}. Name another file."
        ) from None


# ----------------------------------------------------------------------------------------------------------- removing


def _remove_runs(arguments: argparse.Namespace) -> int:
    """Remove the requested runs' folders; gives the exit code."""
    chosen = _to_remove(arguments)
    for item in chosen:
        if not arguments.dry_run:
            try:
                shutil.rmtree(item.folder)
            except OSError as error:
                raise ConfigurationError(
                    f"{item.folder} was to be removed, and can't be: {error.strerror}. Remove it as the user whose run it is."
                ) from None
        print(f"{'would remove' if arguments.dry_run else 'removed'} {item.folder}")
    if not chosen:
        print("There is nothing to remove.")
    return 0


def _to_remove(arguments: argparse.Namespace) -> list[SavedRun]:
    """The requested runs; those that go on are refused by name, unless nothing is heard of them, and passed over where flags choose."""
    from accelerate_nb.events.run_reader import find_run, kept_runs

    if arguments.runs:
        named = [find_run(word, _runs_folder(arguments.folder)) for word in arguments.runs]
        if going_on := [item.folder.name for item in named if not item.is_over and item.stale_since is None]:
            raise ConfigurationError(
                f"{', '.join(going_on)} should be removed, but goes on. `accelerate-nb runs stop` ends a detached run."
            )
        return named
    if arguments.keep is None and arguments.older_than is None:
        raise ConfigurationError("No run was named. Name runs, or choose them with --keep N or --older-than DAYS.")
    for flag, number in (("--keep", arguments.keep), ("--older-than", arguments.older_than)):
        # also where it is no number
        if number is not None and not number >= 0:
            raise ConfigurationError(f"{flag} was given {number}, and nothing was removed. Pass 0 or more.")
    every = kept_runs(_runs_folder(arguments.folder))
    beyond = every[arguments.keep or 0 :]
    latest = time.time() - 86_400 * (arguments.older_than or 0.0)
    return [item for item in beyond if item.is_over and item.started <= latest]
