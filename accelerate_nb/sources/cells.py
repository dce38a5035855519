"""The notebook's own lines: which file name is which cell, and its text, so that tracebacks elsewhere can show it."""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from accelerate_nb.sources.script_lines import cell_line
from accelerate_nb.sources.warning_format import cell_numbers, name_in_warnings


@dataclass(frozen=True, slots=True)
class CellSources:
    """The cells of a notebook: file name to lines, and file name to the number in `In [N]`."""

    lines: Mapping[str, list[str]]
    numbers: Mapping[str, int]

    def name(self, filename: str) -> str:
        """The shown name of a file: `Cell In[3]`, or the file's own name."""
        number = self.numbers.get(filename)
        if number is not None:
            return f"Cell In[{number}]"
        return "a cell" if filename in self.lines else filename

    def location(self, filename: str, line: int) -> str:
        """
        The shown name of a line: `Cell In[3], line 7`, or `File "train.py", line 7`.

        A line of a script that was exported from a notebook is the notebook's: `train.ipynb, cell 3, line 2`.
        """
        name = self.name(filename)
        if filename in self.lines:
            return f"{name}, line {line}"
        return str(cell_line(filename, line) or f'File "{name}", line {line}')

    def install(self) -> None:
        """Make the lines known to this process's tracebacks, warnings and `inspect`."""
        for filename, lines in self.lines.items():
            # without a time of change, linecache never checks the file
            linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)
        name_in_warnings(self.numbers)

    def to_plain(self) -> dict[str, Any]:
        """The same as plain values."""
        return {"lines": dict(self.lines), "numbers": dict(self.numbers)}


def current_sources() -> CellSources:
    """The cells that this process has run; none outside of IPython."""
    names = cell_numbers()
    # files that live only in the line cache: cells, and text that was run by other means (`<doctest …>`)
    cached = [name for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None]
    lines = _lines_of(name for name in cached if name in names or name.startswith("<"))
    return CellSources(lines, {name: number for name, number in names.items() if name in lines})


def sources_of(numbers: Mapping[str, int]) -> CellSources:
    """These cells, with the lines that this process knows of them."""
    return CellSources(_lines_of(name for name in numbers if name in linecache.cache), dict(numbers))


def _lines_of(names: Iterable[str]) -> dict[str, list[str]]:
    return {name: linecache.cache[name][2] for name in names}  # type: ignore[misc]  # entries of cells are never lazy
