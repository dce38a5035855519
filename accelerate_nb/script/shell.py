"""What a script calls: its first lines, commands to a shell, and magics, which IPython runs in the names of the script."""

from __future__ import annotations

import os
import re
import sys
from traceback import TracebackException
from types import FrameType
from typing import TYPE_CHECKING, Any

from accelerate_nb.errors import AccelerateNbError
from accelerate_nb.script.cells import display, shown, wait
from accelerate_nb.script.options import parameters
from accelerate_nb.script.ranks import alike, begin, current_ranks, once_on_machine, system
from accelerate_nb.sources.cells import CellSources, cell_line, name_in_warnings
from accelerate_nb.transport.spawned_processes import send_main_by_value

if TYPE_CHECKING:
    from IPython.utils.text import SList

__all__ = ["begin", "capture", "cell", "display", "line", "parameters", "run", "shown", "start", "wait"]

_RUNTIME = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PACKAGE = os.path.dirname(_RUNTIME.rstrip(os.sep)) + os.sep
# In these files the functions of a script run cells; IPython 7 calls magics by way of `decorator`.
_RUNNERS = tuple(f"{os.sep}{name}" for name in (f"asyncio{os.sep}", "nest_asyncio.py", f"IPython{os.sep}", "decorator"))
# Cell magics that give a text to a program or a file: one process of each machine does it.
_ONCE = frozenset(("bash", "file", "perl", "pypy", "python", "python2", "python3", "ruby", "script", "sh", "writefile"))
_KEEPS_OUTPUT = re.compile(r"--(out|err|proc)\b")


def start(file: str) -> None:
    """From now on, warnings, and an exception that ends the script at `file`, name the notebook's cells and lines."""
    # its random numbers become those of its launch's other processes, and, as in a notebook's ranks, loader workers and
    # pools that start anew get functions without a name, too
    send_main_by_value()
    name_in_warnings()
    sys.excepthook = lambda _, error, __: print(traceback_text(error, file), end="", file=sys.stderr)
    alike(file)


def run(command: str) -> None:
    """Run a command in a shell, as `!command` does: whatever it prints is shown, and a failure is no error."""
    frame = sys._getframe(1)
    # IPython takes a third of a second to import, so it is for commands that may hold values
    if {"{", "$"} & {*command}:
        with _shell_at(frame) as shell:
            command = shell.var_expand(command)
    system(command, frame)


def capture(command: str) -> SList:
    """Run a command as `x = !command` does, in every process: gives the lines that it prints, with `.n`, `.s` and `.l`."""
    with _shell_at(sys._getframe(1)) as shell:
        lines: SList = shell.getoutput(command)
        return lines


def line(name: str, text: str) -> Any:
    """Run a line magic as a notebook does."""
    frame, ranks = sys._getframe(1), current_ranks()
    if name == "accelerate" and ranks is not None:
        return ranks.line(text, frame.f_globals)
    with _shell_at(frame) as shell:
        return shell.run_line_magic(name, text)


def cell(name: str, text: str, cell: str) -> Any:
    """Run a cell magic, with the text of its own line and the lines below it."""
    frame, ranks = sys._getframe(1), current_ranks()
    if name == "accelerate" and ranks is not None:
        ranks.cell(text, cell, frame)
        return None
    cell = cell if cell.endswith("\n") else f"{cell}\n"
    with _shell_at(frame) as shell:
        if name not in _ONCE or _KEEPS_OUTPUT.search(text):
            return shell.run_cell_magic(name, text, cell)
        once_on_machine(frame, lambda: shell.run_cell_magic(name, text, cell))
        return None


def _shell_at(frame: FrameType) -> Any:
    from accelerate_nb.script.ipython import shell_at

    return shell_at(frame)


# ------------------------------------------------------------------------------------------------------------------- errors


def traceback_text(error: BaseException, file: str) -> str:
    """Python's text of an uncaught exception, with the cells and lines of the notebook in it."""
    whole = TracebackException.from_exception(error)
    # the exception, those that it came from, and those of a group
    waiting = [whole]
    while waiting:
        item = waiting.pop()
        _clean(item, file, ours=isinstance(error, AccelerateNbError))
        others = (item.__cause__, item.__context__, *(getattr(item, "exceptions", None) or ()))
        waiting += [other for other in others if other is not None]
    return CellSources({}, {}).in_words("".join(whole.format()))


def _clean(error: TracebackException, file: str, *, ours: bool) -> None:
    """Leave out how the script came to call its cells, and this package, unless an error of another's began there."""
    frames, kept = list(error.stack), []
    raised_in_package = bool(frames) and frames[-1].filename.startswith(_PACKAGE) and not ours
    in_runtime = False
    for frame in frames:
        # asyncio's and IPython's own frames stand below the functions that call them
        is_runner = in_runtime and any(runner in frame.filename for runner in _RUNNERS)
        in_runtime = is_runner or frame.filename.startswith(_RUNTIME)
        if frame.filename == file:
            is_left_out = cell_line(file, frame.lineno or 0) is None
        else:
            is_left_out = is_runner or frame.filename.startswith(_RUNTIME if raised_in_package else _PACKAGE)
        if is_left_out:
            continue
        if frame.filename == file and frame.name.startswith(("_cell_", "<cell line")):
            frame.name = "<module>"
        kept.append(frame)
    error.stack[:] = kept or frames
