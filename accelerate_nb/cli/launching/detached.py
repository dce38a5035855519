"""Runs that outlive their terminal: launched, attached to and stopped from the command line."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate_nb.cli.exit_codes import BROKEN_PIPE, exit_code
from accelerate_nb.errors import AccelerateNbError, ConfigurationError, StoppedError, WorkerError
from accelerate_nb.events.run_folder import shown_path

if TYPE_CHECKING:
    from accelerate_nb.cli.launching.request import LaunchRequest
    from accelerate_nb.events.run_reader import SavedRun
    from accelerate_nb.launching.detached.detached_run import DetachedRun
    from accelerate_nb.launching.front_end import FrontEnd
    from accelerate_nb.worker.program import Program

_PROG = "accelerate-nb runs"


def launch(program: Program, request: LaunchRequest, folder: Path | None) -> int:
    """Have a run host conduct a program, print how it is reached, and return at once; gives the exit code."""
    from accelerate_nb.cli.launching.request import check_ranks
    from accelerate_nb.launching.detached.start import launch_detached
    from accelerate_nb.launching.front_end import NoFrontEnd

    run = launch_detached(program, (), request.config, NoFrontEnd(), folder)
    check_ranks(request, len(run.view.ranks))
    name = shlex.quote(run.folder.name)
    print(f"{run.name} runs detached on {len(run.view.ranks)} ranks ({run.why}).")
    print(f"  {_PROG} attach {name}    its output, live; an interrupt leaves it alone")
    print(f"  {_PROG} stop {name}      stop it after a step that all ranks share")
    print(f"  accelerate_nb.attach({run.folder.name!r})    the same in a notebook")
    print(f"All output: {shown_path(run.folder)}")
    return 0


def attach(saved: SavedRun) -> int:
    """Show a run's output from its last lines on until it is over; gives its exit code."""
    from accelerate_nb.cli.terminal.front_end import terminal

    front_end = terminal()
    run = _run(saved, front_end)
    try:
        run.start().wait()
    except WorkerError as error:
        if not (isinstance(error, StoppedError) or front_end.has_shown_failure):
            print(f"{_PROG}: {error}", file=sys.stderr)
        return exit_code(error)
    except AccelerateNbError as error:
        print(f"{_PROG}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{saved.name} goes on. `{_PROG} attach {saved.folder.name}` shows it again.", file=sys.stderr)
        return 0
    except BrokenPipeError:
        return BROKEN_PIPE
    return 0


def stop(saved: SavedRun, *, kill: bool, timeout: float | None) -> int:
    """Stop a detached run, and wait until it has ended; gives the exit code."""
    from accelerate_nb.launching.front_end import NoFrontEnd

    if saved.is_over:
        print(f"{saved.name} is over: {saved.state}.")
        return 0
    if not saved.is_detached:
        raise ConfigurationError(
            f"{saved.folder.name} was to be stopped, and it is not detached: it belongs to the notebook or the terminal that "
            "launched it. Stop it there, or launch with --detach."
        )
    run = _run(saved, NoFrontEnd()).start()
    if kill:
        run.request_stop("kill")
        run.wait_until_over(timeout)
    else:
        run.stop(timeout)
    if not run.done:
        print(f"{_PROG}: {saved.name} has not ended yet.", file=sys.stderr)
        return 1
    print(
        f"{saved.name} {run.view.state}{f', {run.view.detail}' if run.view.detail else ''}. All output: {shown_path(saved.folder)}"
    )
    return 0


def _run(saved: SavedRun, front_end: FrontEnd) -> DetachedRun:
    from accelerate_nb.launching.detached.detached_run import DetachedRun

    return DetachedRun(saved, front_end)
