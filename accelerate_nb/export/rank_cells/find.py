"""Search for `%accelerate` in a cell, by IPython's own rules."""

from __future__ import annotations

import ast
import re
import textwrap
from dataclasses import dataclass

from accelerate_nb.export.magics import cell_magic, is_too_deep, parsed, transformed

NAME = "accelerate"
# Cell magics whose text is Python that runs in the notebook.
_OF_PYTHON = frozenset({"time", "timeit", "capture", "prun", "memit", "mprun", "lprun", "snakeviz", "scalene"})
_NONE_OF_IPYTHON = re.compile(r"[%!?]|^\s*[,;/]", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class AccelerateLine:
    """A line `%accelerate ...`, which begins at `column` of line `first`; `text` is what follows its name."""

    first: int
    last: int
    column: int
    text: str
    is_cell_magic: bool = False  # `%%accelerate`, where only `%accelerate` can stand


@dataclass(frozen=True, slots=True)
class CellCommands:
    """
    A cell's code with calls in place of IPython's own syntax, on the same lines, and the `%accelerate` commands in it.

    `tree` is None for what is no Python, or more than Python can follow.
    """

    source: str
    python: str
    tree: ast.Module | None
    commands: tuple[AccelerateLine, ...] = ()


def parse_commands(source: str) -> CellCommands:
    """
    The Python code of a cell, with the commands in it.

    >>> parse_commands("%accelerate push x y").commands
    (AccelerateLine(first=1, last=1, column=0, text='push x y', is_cell_magic=False),)
    """
    source = _dedented(source)
    python, commands = _in_python(_without_cell_magic(source))
    return CellCommands(source, python, None if is_too_deep(python) else parsed(python), commands)


def _dedented(source: str) -> str:
    """IPython takes away what all lines are indented by."""
    first = next((line for line in source.split("\n") if line.strip()), "")
    return textwrap.dedent(source) if first[:1].isspace() else source


def _without_cell_magic(source: str) -> str:
    """The code below a cell magic, on its lines, with bindings in place of those of the magic."""
    lines = source.split("\n")
    magic = cell_magic(lines)
    if magic is None:
        return source
    if magic.name not in _OF_PYTHON:
        return ""
    names = [word for word in magic.rest.split() if word.isidentifier()] if magic.name == "capture" else []
    bound = "".join(f"{name} = None" for name in names[:1])
    return "\n".join([*[""] * (magic.line - 1), bound, *lines[magic.line :]])


def _in_python(source: str) -> tuple[str, tuple[AccelerateLine, ...]]:
    if not _NONE_OF_IPYTHON.search(source):
        return source, ()
    lines, calls = transformed(source.split("\n"))
    commands = (
        AccelerateLine(call.first, call.last, len(call.before), call.text, is_cell_magic=call.name != NAME)
        for call in calls
        if call.name in {NAME, f"%{NAME}"}
    )
    return "\n".join(lines), tuple(sorted(commands, key=lambda item: item.first))
