"""The cell and line that a line of an exported script came from."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

# What ends each line of a script that is no line of a cell.
_ADDED = "  # +"
_FIRST = re.compile(r"# Exported from (?P<notebook>.+) by accelerate-nb\b")
_MARKER = "# %% "


@dataclass(frozen=True, slots=True)
class CellLine:
    """A line of a cell; `str` gives the text that a person reads: `train.ipynb, cell 3, line 2`."""

    notebook: str
    cell: int
    line: int

    def __str__(self) -> str:
        return f"{self.notebook}, cell {self.cell}, line {self.line}"


def cell_line(path: str, line: int) -> CellLine | None:
    """
    The notebook, the cell and the line that a line of a script was; None for other files, and for lines that were added.

    >>> str(cell_line("train.py", 31))
    'train.ipynb, cell 3, line 2'
    """
    lines = linecache.getlines(path)
    if notebook_of(lines[0] if lines else "") is None:
        return None
    return _table(tuple(lines)).get(line)


def notebook_of(first: str) -> str | None:
    """The notebook that a script with this first line was exported from; None for any other file."""
    found = _FIRST.match(first)
    return found["notebook"] if found else None


def first_line(notebook: str, version: str) -> str:
    """The first line of a script."""
    return f"# Exported from {notebook} by accelerate-nb {version}."


def marker(notebook: str, number: int | None) -> str:
    """The line above a cell, at which editors show it as one."""
    return f"{_MARKER}[markdown]" if number is None else f"{_MARKER}[{number}] {notebook}"


def added(text: str) -> str:
    """A line that is none of the notebook's."""
    return text + _ADDED


def is_added(line: str) -> bool:
    """Whether a line of a script is none of the notebook's."""
    return line.rstrip("\n").endswith(_ADDED)


def kept(text: str) -> str:
    """A line of the notebook, which is never taken for an added one."""
    return f"{text} " if is_added(text) else text


def table(lines: Sequence[str]) -> dict[int, CellLine]:
    """The cell line of each line of a script that was a cell's; lines count from 1."""
    notebook = notebook_of(lines[0] if lines else "")
    return {} if notebook is None else dict(_places(lines, notebook))


@lru_cache(maxsize=16)
def _table(lines: tuple[str, ...]) -> dict[int, CellLine]:
    return table(lines)


def _places(lines: Sequence[str], notebook: str) -> Iterator[tuple[int, CellLine]]:
    cell, line = None, 0
    begins = re.compile(re.escape(_MARKER) + r"(?:\[(?P<cell>\d+)\] " + re.escape(notebook) + r"|\[markdown\])$")
    for number, text in enumerate(lines, start=1):
        if found := begins.match(text.rstrip("\n")):
            cell, line = found["cell"] and int(found["cell"]), 0
        elif cell and not is_added(text):
            line += 1
            yield number, CellLine(notebook, cell, line)
