"""What a script calls: its first lines, commands to a shell, and magics, which IPython runs in the names of the script."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from accelerate_nb.script.commands import expanded, once_on_machine, system
from accelerate_nb.script.display import display, shown
from accelerate_nb.script.error_locations import name_in_tracebacks
from accelerate_nb.script.options import parameters
from accelerate_nb.script.ranks import begin, current_ranks
from accelerate_nb.script.shared_seed import alike
from accelerate_nb.script.top_level_await import wait

if TYPE_CHECKING:
    from IPython.utils.text import SList

__all__ = ["begin", "capture", "cell", "display", "line", "parameters", "run", "shown", "start", "wait"]

# Cell magics that give a text to a program or a file: one process of each machine does it.
_ONCE = frozenset(("bash", "file", "perl", "pypy", "python", "python2", "python3", "ruby", "script", "sh", "writefile"))
_KEEPS_OUTPUT = re.compile(r"--(out|err|proc)\b")


def start(file: str) -> None:
    """Let a script's errors name the notebook's cells, and its random numbers be those of its launch's other processes."""
    name_in_tracebacks(file)
    alike(file)


def run(command: str) -> None:
    """Run a command in a shell, as `!command` does: whatever it prints is shown, and a failure is no error."""
    # in a launched script one process of each machine runs it while the others wait, in a %%accelerate cell each its
    # own
    frame = sys._getframe(1)
    system(expanded(command, {**frame.f_globals, **frame.f_locals}), frame)


def capture(command: str) -> SList:
    """Run a command as `x = !command` does, in every process: gives the lines that it prints, with `.n`, `.s` and `.l`."""
    from IPython.utils.process import getoutput  # type: ignore[attr-defined] # IPython passes it on
    from IPython.utils.text import SList

    frame = sys._getframe(1)
    return SList(getoutput(expanded(command, {**frame.f_globals, **frame.f_locals})).splitlines())


def line(name: str, text: str) -> Any:
    """Run a line magic as a notebook does."""
    frame, ranks = sys._getframe(1), current_ranks()
    if name == "accelerate" and ranks is not None:
        return ranks.line(text, frame.f_globals)
    with _shell_at(frame) as shell:
        return shell.run_line_magic(name, text)


def cell(name: str, text: str, cell: str) -> Any:
    """Run a cell magic, with the text of its own line and the lines below it."""
    # what gives a text to a program or a file is done by one process of each machine, and in a %%accelerate cell by
    # each
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


@contextmanager
def _shell_at(frame: FrameType) -> Iterator[Any]:
    """The shell of this script, with the names of a frame, which `get_ipython` gives until the end of the block."""
    from IPython.core.interactiveshell import InteractiveShell

    from accelerate_nb.script.ipython import script_shell

    shell, other = script_shell(), InteractiveShell._instance
    kept = shell.user_module, shell.user_ns, shell.frame
    names = frame.f_globals
    for history, first in (("_ih", [""]), ("_oh", {}), ("_dh", [Path.cwd()])):
        names.setdefault(history, first)
    try:
        InteractiveShell._instance = shell
        shell.user_module, shell.user_ns = shell.prepare_user_module(None, names)
        shell.frame = frame
        yield shell
    finally:
        shell.user_module, shell.user_ns, shell.frame = kept
        InteractiveShell._instance = other
