"""The cell and line where code stands, in a notebook, its ranks and an exported script; warnings and tracebacks name it."""

import linecache
import re
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

# What ends each line of a script that is no line of a cell.
_ADDED = "  # +"
_FIRST = re.compile(r"# Exported from (?P<notebook>.+) by accelerate-nb\b")
_MARKER = "# %% "
_FRAME = re.compile(r'^(?P<before>[ |+-]*)(?P<file>File "(?P<path>.+)", (?:line|lineno) (?P<line>\d+))', re.MULTILINE)


def cell_line(path: str, line: int) -> str | None:
    """What a line of a script was (`train.ipynb, cell 3, line 2`); None for other files, and for lines that were added."""
    lines = linecache.getlines(path)
    if notebook_of(lines[0] if lines else "") is None:
        return None
    return _kept_table(tuple(lines)).get(line)


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


def table(lines: Sequence[str]) -> dict[int, str]:
    """The notebook, cell and line of each line of a script that was a cell's; lines count from 1."""
    notebook = notebook_of(lines[0] if lines else "")
    if notebook is None:
        return {}
    cell, line, places = "", 0, dict[int, str]()
    begins = re.compile(re.escape(_MARKER) + r"(?:\[(?P<cell>\d+)\] " + re.escape(notebook) + r"|\[markdown\])$")
    for number, text in enumerate(lines, start=1):
        if found := begins.match(text.rstrip("\n")):
            cell, line = found["cell"] or "", 0
        elif cell and not is_added(text):
            line += 1
            places[number] = f"{notebook}, cell {cell}, line {line}"
    return places


_kept_table = lru_cache(maxsize=16)(table)


def ipython_shell() -> Any:
    """IPython's shell where this process has one; a process that never imported IPython has none."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def kept_numbers(shell: Any) -> dict[str, int]:
    """The numbers of cells that an IPython shell keeps, by the names of their files; IPython 7 has none, and gets an empty table."""
    numbers: dict[str, int] = vars(shell.compile).setdefault("_filename_map", {})
    return numbers


def cell_numbers() -> dict[str, int]:
    """The numbers of IPython's cells that this process has run, by the names of their files; it keeps them for its own tracebacks."""
    if (shell := ipython_shell()) is None:
        return {}
    numbers = dict(kept_numbers(shell))
    if sys.modules["IPython"].version_info >= (8,):
        return numbers
    # IPython 7 keeps the cells in their order, and the names with the text
    order = {source: number for number, source in enumerate(shell.history_manager.input_hist_parsed) if number}
    texts = {name: "".join(entry[2]).rstrip("\n") for name, entry in linecache._ipython_cache.items()}  # type: ignore[attr-defined]
    return {name: order[text] for name, text in texts.items() if text in order} | numbers


def name_in_warnings(numbers: Mapping[str, int] | None = None) -> None:
    """From now on, let a printed warning name the cell and line, also of an exported script, or of cells with these `numbers`."""
    # `formatwarning` is there to be replaced, but a replacement does not get the object that a warning is about, and
    # Python no longer prints where that was allocated
    formatted = getattr(warnings, "_formatwarnmsg_impl", None)
    if formatted is not None and not isinstance(formatted, _WarningFormatter):
        formatted = warnings._formatwarnmsg_impl = _WarningFormatter(formatted)  # type: ignore[attr-defined]
    if formatted is not None:
        formatted.numbers.update(numbers or {})


class _WarningFormatter:
    def __init__(self, formatted: Any) -> None:
        self._formatted = formatted
        self.numbers: dict[str, int] = {}

    def __call__(self, warning: warnings.WarningMessage) -> str:
        text: str = self._formatted(warning)
        head = f"{warning.filename}:{warning.lineno}: "
        if text.startswith(head):
            number = cell_numbers().get(warning.filename, self.numbers.get(warning.filename))
            of_script = cell_line(warning.filename, warning.lineno) if number is None else None
            if number is not None or of_script is not None:
                text = f"{of_script or f'Cell In[{number}], line {warning.lineno}'}: {text.removeprefix(head)}"
        return CellSources({}, {}).in_words(text)


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
        """The shown name of a line: `Cell In[3], line 7`, `File "train.py", line 7`, of a script `train.ipynb, cell 3, line 2`."""
        name = self.name(filename)
        if filename in self.lines:
            return f"{name}, line {line}"
        return cell_line(filename, line) or f'File "{name}", line {line}'

    def in_words(self, text: str) -> str:
        """A text with the shown names of the lines in its tracebacks: `File "train.py", line 31` is `train.ipynb, cell 3, line 2`."""
        return _FRAME.sub(lambda at: f"{at['before']}{self.location(at['path'], int(at['line']))}", text)

    def install(self) -> None:
        """Make the lines known to this process's tracebacks, warnings and `inspect`."""
        for filename, lines in self.lines.items():
            # without a time of change, linecache never checks the file
            linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)
        name_in_warnings(self.numbers)


def current_sources() -> CellSources:
    """The cells that this process has run; none outside of IPython."""
    names = cell_numbers()
    # files that live only in the line cache: cells, and text that was run by other means (`<doctest …>`)
    cached = [
        name for name, entry in linecache.cache.items() if len(entry) == 4 and (entry[1] is None or name in names)
    ]
    lines = _lines_of(name for name in cached if name in names or name.startswith("<"))
    return CellSources(lines, {name: number for name, number in names.items() if name in lines})


def sources_of(numbers: Mapping[str, int]) -> CellSources:
    """These cells, with the lines that this process knows of them."""
    return CellSources(_lines_of(name for name in numbers if name in linecache.cache), dict(numbers))


def _lines_of(names: Iterable[str]) -> dict[str, list[str]]:
    return {name: linecache.cache[name][2] for name in names}  # type: ignore[misc]  # entries of cells are never lazy
