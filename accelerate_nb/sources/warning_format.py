"""Warnings of an exported script name notebook, cell and line."""

from __future__ import annotations

import re
import warnings
from typing import Any

from accelerate_nb.sources.script_lines import cell_line


def name_in_warnings() -> None:
    """
    From now on, let a warning that is printed name the line of the notebook that the script's line was.

    What decides whether it is printed, where it goes and its format stay as they are, and so do the warnings of other files.

    >>> name_in_warnings()
    """
    # `formatwarning` is there to be replaced, but a replacement does not get the object that a warning is about, and
    # Python no longer prints where that was allocated
    formatted = getattr(warnings, "_formatwarnmsg_impl", None)
    if formatted is not None and not isinstance(formatted, _WarningFormatter):
        warnings._formatwarnmsg_impl = _WarningFormatter(formatted)  # type: ignore[attr-defined]


class _WarningFormatter:
    """Formats a warning, with the line of the notebook in it."""

    def __init__(self, formatted: Any) -> None:
        self._formatted = formatted

    def __call__(self, warning: warnings.WarningMessage) -> str:
        text: str = self._formatted(warning)
        head = f"{warning.filename}:{warning.lineno}: "
        found = cell_line(warning.filename, warning.lineno)
        if found is not None and text.startswith(head):
            text = f"{found}: {text.removeprefix(head)}"
        return in_words(text)


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
