"""Exit codes of commands: those of a run that a signal ended, and those of a run that failed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accelerate_nb.errors import WorkerError

# This, and the signal's number: of a command that a signal ended, as shells give it.
BY_SIGNAL = 128
INTERRUPTED = BY_SIGNAL + 2
# Of a program that wrote to a pipe without a reader.
BROKEN_PIPE = BY_SIGNAL + 13


def exit_code(error: WorkerError) -> int:
    """
    The exit code of the command: that of the program itself, where it exited by itself.

    A process that exits with 0 by itself is no failure, even if its Python did not run to its end.
    """
    first = next((failure for failure in error.failures if failure.rank == error.rank), None)
    if first is None:
        return 1
    if first.type == "SystemExit":
        return int(first.message) & 0xFF if re.fullmatch(r"-?\d+", first.message) else 1
    if first.exit_code is None or first.exit_code < 0:
        return 1
    return first.exit_code or int(any(failure.exit_code != 0 for failure in error.failures))
