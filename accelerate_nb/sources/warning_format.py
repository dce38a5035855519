"""Warnings name the cell and the line, in a notebook, in its ranks and in an exported script."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from accelerate_nb.sources.script_lines import cell_line


def cell_numbers() -> dict[str, int]:
    """The numbers of IPython's cells that this process has run, by the names of their files; it keeps them for its own tracebacks."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return dict(getattr(getattr(shell, "compile", None), "_filename_map", {}))


def name_in_warnings(numbers: Mapping[str, int] | None = None) -> None:
    """
    From now on, let a warning that is printed name the cell and its line: `Cell In[4], line 15`, or of an exported script the notebook's.

    Cells are those of this process, and those whose `numbers` are given. What decides whether a warning is printed, where it goes and
    its format stay as they are, and so do the warnings of other files.

    >>> name_in_warnings()
    """
    # `formatwarning` is there to be replaced, but a replacement does not get the object that a warning is about, and
    # Python no longer prints where that was allocated
    formatted = getattr(warnings, "_formatwarnmsg_impl", None)
    if formatted is not None and not isinstance(formatted, _WarningFormatter):
        formatted = warnings._formatwarnmsg_impl = _WarningFormatter(formatted)  # type: ignore[attr-defined]
    if formatted is not None:
        formatted.numbers.update(numbers or {})


class _WarningFormatter:
    """Formats a warning, with the line of the notebook in it."""

    def __init__(self, formatted: Any) -> None:
        self._formatted = formatted
        self.numbers: dict[str, int] = {}

    def __call__(self, warning: warnings.WarningMessage) -> str:
        text: str = self._formatted(warning)
        head = f"{warning.filename}:{warning.lineno}: "
        if text.startswith(head) and (found := self._location(warning.filename, warning.lineno)):
            text = f"{found}: {text.removeprefix(head)}"
        return in_words(text)

    def _location(self, filename: str, line: int) -> str:
        number = cell_numbers().get(filename, self.numbers.get(filename))
        return str(cell_line(filename, line) or "") if number is None else f"Cell In[{number}], line {line}"


def in_words(text: str) -> str:
    """
    A traceback's text where each line `File "train.py", line 31` of an exported script is `train.ipynb, cell 3, line 2`.

    >>> in_words('  File "other.py", line 3')
    '  File "other.py", line 3'
    """
    return _FRAME.sub(_named, text)


_FRAME = re.compile(r'^(?P<before>[ |+-]*)(?P<file>File "(?P<path>.+)", (?:line|lineno) (?P<line>\d+))', re.MULTILINE)


def _named(found: re.Match[str]) -> str:
    return f"{found['before']}{cell_line(found['path'], int(found['line'])) or found['file']}"
