"""The notebook's own lines: which file name is which cell, and its text, so that tracebacks elsewhere can show it."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from accelerate_nb.export.places import place
from accelerate_nb.export.warned import name_in_warnings


@dataclass(frozen=True, slots=True)
class Sources:
    """The cells of a notebook: file name to lines, and file name to the number in `In [N]`."""

    lines: Mapping[str, list[str]]
    numbers: Mapping[str, int]

    def name(self, filename: str) -> str:
        """What a person calls a file: `Cell In[3]`, or the file's own name."""
        number = self.numbers.get(filename)
        if number is not None:
            return f"Cell In[{number}]"
        return "a cell" if filename in self.lines else filename

    def place(self, filename: str, line: int) -> str:
        """
        What a person calls a line: `Cell In[3], line 7`, or `File "train.py", line 7`.

        A line of a script that was exported from a notebook is the notebook's: `train.ipynb, cell 3, line 2`.
        """
        name = self.name(filename)
        if filename in self.lines:
            return f"{name}, line {line}"
        return str(place(filename, line) or f'File "{name}", line {line}')

    def install(self) -> None:
        """Make the lines known to this process's tracebacks, warnings and `inspect`."""
        for filename, lines in self.lines.items():
            # without a time of change, linecache never looks for the file
            linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)
        name_in_warnings()

    def to_plain(self) -> dict[str, Any]:
        """The same as plain values."""
        return {"lines": dict(self.lines), "numbers": dict(self.numbers)}


def sources_here() -> Sources:
    """The cells that this process has run; none outside of IPython."""
    names = _cell_names()
    lines = _lines_of(_cached_cells(names))
    return Sources(lines, {name: number for name, number in names.items() if name in lines})


def sources_of(numbers: Mapping[str, int]) -> Sources:
    """These cells, with the lines that this process knows of them."""
    return Sources(_lines_of(name for name in numbers if name in linecache.cache), dict(numbers))


def _lines_of(names: Iterable[str]) -> dict[str, list[str]]:
    return {name: linecache.cache[name][2] for name in names}  # type: ignore[misc]  # entries of cells are never lazy


def _cached_cells(names: Mapping[str, int]) -> list[str]:
    """Files that live only in the line cache: cells, and text that was run by other means (`<doctest …>`)."""
    return [
        name
        for name, entry in linecache.cache.items()
        if len(entry) == 4 and entry[1] is None and (name in names or name.startswith("<"))
    ]


def _cell_names() -> dict[str, int]:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    # IPython keeps the numbers of its cells by file name, for its own tracebacks
    return dict(getattr(getattr(shell, "compile", None), "_filename_map", {}))
