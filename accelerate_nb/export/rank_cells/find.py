"""Search for `%accelerate` in a cell, by IPython's own rules."""

from __future__ import annotations

import ast
import re
import textwrap
from dataclasses import dataclass
from typing import Any

from accelerate_nb.export.ipython.find import is_too_deep, parsed

NAME = "accelerate"
_CALL = f"get_ipython().run_line_magic({NAME!r}, "
_WRONG_CALL = f"get_ipython().run_line_magic({'%' + NAME!r}, "
# Cell magics whose text is Python that runs in the notebook.
_OF_PYTHON = frozenset({"time", "timeit", "capture", "prun", "memit", "mprun", "lprun", "snakeviz", "scalene"})
_CELL_MAGIC = re.compile(r"%%(?P<name>\w+)(?!\?|\w)(?P<rest>.*)")
_NONE_OF_IPYTHON = re.compile(r"[%!?]|^\s*[,;/]", re.MULTILINE)
# A cell has as many commands at the most; whatever goes round in circles ends there.
_LIMIT = 10_000


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


@dataclass(frozen=True, slots=True)
class CellMagicLine:
    """A cell magic in the first line that is not empty; lines count from 1."""

    name: str
    rest: str
    line: int


def cell_magic(source: str) -> CellMagicLine | None:
    r"""
    The cell magic of a cell, where it has one.

    >>> cell_magic("%%accelerate -n 2\nprint(rank)")
    CellMagicLine(name='accelerate', rest=' -n 2', line=1)
    """
    for number, line in enumerate(source.split("\n"), start=1):
        if line.strip():
            found = _CELL_MAGIC.fullmatch(line.rstrip())
            return CellMagicLine(found["name"], found["rest"], number) if found else None
    return None


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
    magic = cell_magic(source)
    if magic is None:
        return source
    if magic.name not in _OF_PYTHON:
        return ""
    names = [word for word in magic.rest.split() if word.isidentifier()] if magic.name == "capture" else []
    below = source.split("\n")[magic.line :]
    return "\n".join([*[""] * (magic.line - 1), "".join(f"{name} = None" for name in names[:1]), *below])


def _in_python(source: str) -> tuple[str, tuple[AccelerateLine, ...]]:
    if not _NONE_OF_IPYTHON.search(source):
        return source, ()
    from IPython.core.inputtransformer2 import TransformerManager, make_tokens_by_line

    transformers: Any = TransformerManager().token_transformers  # type: ignore[no-untyped-call]  # IPython's own
    lines = [f"{line}\n" for line in source.split("\n")]
    commands: list[AccelerateLine] = []
    for _ in range(_LIMIT):
        tokens = make_tokens_by_line(lines)
        found = sorted(
            filter(None, (transformer.find(tokens) for transformer in transformers)), key=lambda item: item.sortby()
        )
        if (step := _first_step(found, lines)) is None:
            break
        first, column, changed = step
        missing = len(lines) - len(changed)
        call = changed[first][column:]
        # all lines keep their numbers
        lines = [*changed[: first + 1], *["\n"] * missing, *changed[first + 1 :]]
        if call.startswith((_CALL, _WRONG_CALL)):
            text = ast.literal_eval(call[call.index(",") + 1 : call.rindex(")")].strip())
            commands.append(AccelerateLine(first + 1, first + 1 + missing, column, text, call.startswith(_WRONG_CALL)))
    return "".join(lines).removesuffix("\n"), tuple(sorted(commands, key=lambda item: item.first))


def _first_step(found: list[object], lines: list[str]) -> tuple[int, int, list[str]] | None:
    for item in found:
        try:
            # `start_line` and `start_col` are the position at which IPython's transformers found something
            return item.start_line, item.start_col, item.transform(lines)  # type: ignore[attr-defined]
        except SyntaxError:
            continue
    return None
