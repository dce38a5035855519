"""The end of a command: exit codes of runs that a signal ended, or that failed."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

from accelerate_nb.errors import StoppedError, WorkerError

if TYPE_CHECKING:
    from accelerate_nb.launching.run import Run
    from accelerate_nb.notebook.display.text import TextFrontEnd

# This, and the signal's number: of a command that a signal ended, as shells give it.
BY_SIGNAL = 128
INTERRUPTED = BY_SIGNAL + 2
# Of a program that wrote to a pipe without a reader.
BROKEN_PIPE = BY_SIGNAL + 13


def exit_code(error: WorkerError) -> int:
    """The exit code of the command: that of the program itself, where it exited by itself."""
    # a process that exits with 0 by itself is no failure, even if its Python did not run to its end
    first = next((failure for failure in error.failures if failure.rank == error.rank), None)
    if first is None:
        return 1
    if first.type == "SystemExit":
        return int(first.message) & 0xFF if re.fullmatch(r"-?\d+", first.message) else 1
    if first.exit_code is None or first.exit_code < 0:
        return 1
    return first.exit_code or int(any(failure.exit_code != 0 for failure in error.failures))


def waited_for(run: Run, front_end: TextFrontEnd, command: str) -> int:
    """Start a run, wait until it is over, print why it failed where the front end has not; gives the exit code of the command."""
    try:
        run.start().wait()
    except WorkerError as error:
        if not (isinstance(error, StoppedError) or front_end.has_shown_failure):
            print(f"{command}: {error}", file=sys.stderr)
        return exit_code(error)
    except BrokenPipeError:
        return BROKEN_PIPE
    return 0
