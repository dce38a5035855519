"""Where `%accelerate` stands among a cell's lines, found as IPython finds it."""

from __future__ import annotations

import ast
import re
import textwrap
from dataclasses import dataclass
from typing import Any

from accelerate_nb.export.calls import is_too_deep, parsed

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
class Command:
    """A line `%accelerate ...`, which begins at `column` of line `first`; `text` is what follows its name."""

    first: int
    last: int
    column: int
    text: str
    is_cell_magic: bool = False  # `%%accelerate`, where only `%accelerate` can stand


@dataclass(frozen=True, slots=True)
class Heard:
    """
    A cell's code with calls in the place of IPython's own syntax, on the lines on which it stands, and our commands in it.

    `tree` is None for what is no Python, or more than Python can follow.
    """

    source: str
    python: str
    tree: ast.Module | None
    commands: tuple[Command, ...] = ()


@dataclass(frozen=True, slots=True)
class CellMagic:
    """What stands behind `%%name` in the first line that is not empty; lines count from 1."""

    name: str
    rest: str
    line: int


def cell_magic(source: str) -> CellMagic | None:
    r"""
    The cell magic of a cell, where it has one.

    >>> cell_magic("%%accelerate -n 2\nprint(rank)")
    CellMagic(name='accelerate', rest=' -n 2', line=1)
    """
    for number, line in enumerate(source.split("\n"), start=1):
        if line.strip():
            found = _CELL_MAGIC.fullmatch(line.rstrip())
            return CellMagic(found["name"], found["rest"], number) if found else None
    return None


def heard(source: str) -> Heard:
    """
    What a cell's code does, as far as it is Python, with the commands that are found in it.

    >>> heard("%accelerate push x y").commands
    (Command(first=1, last=1, column=0, text='push x y', is_cell_magic=False),)
    """
    source = _dedented(source)
    python, commands = _in_python(_without_cell_magic(source))
    return Heard(source, python, None if is_too_deep(python) else parsed(python), commands)


def _dedented(source: str) -> str:
    """IPython takes away what all lines are indented by."""
    first = next((line for line in source.split("\n") if line.strip()), "")
    return textwrap.dedent(source) if first[:1].isspace() else source


def _without_cell_magic(source: str) -> str:
    """The code below a cell magic, on its lines; what the magic binds is bound in its place."""
    magic = cell_magic(source)
    if magic is None:
        return source
    if magic.name not in _OF_PYTHON:
        return ""
    names = [word for word in magic.rest.split() if word.isidentifier()] if magic.name == "capture" else []
    below = source.split("\n")[magic.line :]
    return "\n".join([*[""] * (magic.line - 1), "".join(f"{name} = None" for name in names[:1]), *below])


def _in_python(source: str) -> tuple[str, tuple[Command, ...]]:
    if not _NONE_OF_IPYTHON.search(source):
        return source, ()
    from IPython.core.inputtransformer2 import TransformerManager, make_tokens_by_line

    kinds: Any = TransformerManager().token_transformers  # type: ignore[no-untyped-call]  # IPython's own
    lines = [f"{line}\n" for line in source.split("\n")]
    commands: list[Command] = []
    for _ in range(_LIMIT):
        tokens = make_tokens_by_line(lines)
        found = sorted(filter(None, (kind.find(tokens) for kind in kinds)), key=lambda one: one.sortby())
        if (step := _first_step(found, lines)) is None:
            break
        first, column, changed = step
        missing = len(lines) - len(changed)
        call = changed[first][column:]
        # all lines keep their numbers
        lines = [*changed[: first + 1], *["\n"] * missing, *changed[first + 1 :]]
        if call.startswith((_CALL, _WRONG_CALL)):
            text = ast.literal_eval(call[call.index(",") + 1 : call.rindex(")")].strip())
            commands.append(Command(first + 1, first + 1 + missing, column, text, call.startswith(_WRONG_CALL)))
    return "".join(lines).removesuffix("\n"), tuple(sorted(commands, key=lambda one: one.first))


def _first_step(found: list[object], lines: list[str]) -> tuple[int, int, list[str]] | None:
    for one in found:
        try:
            # `start_line` and `start_col` are how IPython's transformers say where they found something
            return one.start_line, one.start_col, one.transform(lines)  # type: ignore[attr-defined]
        except SyntaxError:
            continue
    return None
