"""The meaning of a line of output: an error, a warning, a bar that has ended, or none of these."""

from __future__ import annotations

import re

from accelerate_nb.events.model import Meaning
from accelerate_nb.events.terminal_lines import METER

# A line without any of these means nothing; most lines are such, and looking for these is quick.
_LEVELS = ("ERROR", "WARN", "CRITICAL", "FATAL")
_LOWER_LEVELS = ("rror", "arning", "ritical", "atal")
_SIGNS = (*_LEVELS, *_LOWER_LEVELS, "most recent call", "xception", "terminate called", "what():", "] ", " [")
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
# torch puts it before each line of an exception that ends a rank, and before what its compiled code logs
_RANK = re.compile(r"\[rank\d+\]: ?")

_TRACEBACK = re.compile(
    r"(  [+] Exception Group )?Traceback \(most recent call last\):"
    r"|Exception (in thread .*|ignored (in|on|while) ?.*):?$"
    r"|(Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):"
)
_LAST_OF_A_TRACEBACK = re.compile(r"[A-Za-z_][\w.<>]*(:|$)")
_FATAL = re.compile(
    r"The above exception was the direct cause of the following exception:"
    r"|During handling of the above exception, another exception occurred:"
    r"|Fatal Python error: |terminate called (after|without)|  what\(\):  "
)

# `file.py:3: UserWarning: text`, and the source line below it
_PYTHON_WARNING = re.compile(r"(.+(:|, line )\d+: )?\w*Warning: ")
_WORD = re.compile(r"\b(TRACE|DEBUG|INFO|NOTICE|SUCCESS|WARN(?:ING)?|ERROR|CRITICAL|FATAL)\b")
_BRACKETED = re.compile(r"\[(warning|error|critical|fatal) *\]")  # structlog
_TIME = re.compile(r"\W*\d{2,4}[-:/.]\d\d")
_FIELD = re.compile(r"([\[(<|]|- |: |\| |\] )\s*$")
_AFTER = re.compile(r"\s*[\]:|)>,]|\s*$|\s+-\s")
_TEXT_AFTER = re.compile(r"\s+(?![A-Z]{2,}\b)")
# glog, absl and torch: `W0101 12:00:00.123456 77 run.py:12] text`, `[W101 12:00:00.1 reducer.cpp:1529] text`, `[W socket.cpp:697] `
_GLOG = re.compile(r"\[?([IWEF])(\d{3,4} \d\d:\d\d:\d\d\S*)? *[^\]]*?\S+:\d+\] ")
# TensorFlow and XLA: `2026-01-01 12:00:00.123456: W external/xla/file.cc:64] text`
_TENSORFLOW = re.compile(r"\d{4}-\d\d-\d\d [\d:.]+: ([IWEF]) \S+:\d+\] ")
_NCCL = re.compile(r"\S+:\d+:\d+ \[\d+\] (\S+ )?NCCL WARN ")

_GLOG_LEVELS: dict[str, Meaning] = {"W": "warning", "E": "error", "F": "error"}
_WORDS: dict[str, Meaning] = {
    "WARN": "warning",
    "WARNING": "warning",
    "ERROR": "error",
    "CRITICAL": "error",
    "FATAL": "error",
}


class LineClassifier:
    """
    Reads the lines of a stream one after the other, and classifies each: a traceback takes several.

    Nothing else decides it; a line carries its meaning to the front ends.

    >>> meanings = LineClassifier()
    >>> [meanings.of(text) for text in ("INFO:root:begins", "Traceback (most recent call last):", "ValueError: no")]
    ['', 'error', 'error']
    """

    def __init__(self) -> None:
        self._is_in_traceback = self._is_under_warning = False

    def of(self, text: str) -> Meaning:
        """The meaning of the next line."""
        if not self._is_in_traceback and not self._is_under_warning and not any(sign in text for sign in _SIGNS):
            return ""
        text = _RANK.sub("", _COLOUR.sub("", text) if "\x1b" in text else text, count=1)
        is_under_warning, self._is_under_warning = self._is_under_warning, False
        if is_under_warning and text.startswith("  "):
            return "warning"
        if self._is_in_traceback and (found := self._in_traceback(text)):
            return found
        if _TRACEBACK.match(text):
            self._is_in_traceback = True
            return "error"
        if _FATAL.match(text):
            return "error"
        if "arning: " in text and _PYTHON_WARNING.match(text):
            self._is_under_warning = True
            return "warning"
        return _of_level(text) or ("bar" if "/" in text and METER.search(text) else "")

    def _in_traceback(self, text: str) -> Meaning:
        if text.startswith((" ", "\t")):
            return "error"
        self._is_in_traceback = False
        return "error" if _LAST_OF_A_TRACEBACK.match(text) and not _TRACEBACK.match(text) else ""


def _of_level(text: str) -> Meaning:
    """The meaning of the level that a logger has written, if it is one of those known."""
    if found := _GLOG.match(text) or _TENSORFLOW.match(text):
        return _GLOG_LEVELS.get(found[1], "")
    if any(level in text for level in _LOWER_LEVELS) and (found := _BRACKETED.search(text, 0, 60)):
        return _WORDS[found[1].upper()]
    if not any(level in text for level in _LEVELS):
        return ""
    if _NCCL.match(text):
        return "warning"
    # the first level is the line's own; later ones belong to its text
    found = _WORD.search(text, 0, 200)
    if found is None:
        return ""
    before, end = text[: found.start()], found.end()
    if not any(map(str.isalpha, before)) or _TIME.match(before):
        is_level = _AFTER.match(text, end) or _TEXT_AFTER.match(text, end)
    else:
        is_level = _FIELD.search(before) and _AFTER.match(text, end)
    return _WORDS.get(found[1], "") if is_level else ""
