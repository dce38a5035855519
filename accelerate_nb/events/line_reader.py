"""The lines of a process's output, split at newlines whatever the bytes are, and their meaning: an error, a warning, a bar."""

import codecs
import re
from collections.abc import Iterable
from dataclasses import dataclass

from accelerate_nb.events.event_types import Meaning
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

# The first letters of levels that alarm: of glog's, and of the words in `_WORD`.
_ALARMS: dict[str, Meaning] = {"W": "warning", "E": "error", "F": "error", "C": "error"}


class LineClassifier:
    """Reads the lines of a stream one after the other, and classifies each, which nothing else does: a traceback takes several."""

    def __init__(self) -> None:
        self._is_in_traceback = self._is_under_warning = False

    def of(self, text: str) -> Meaning:
        if not self._is_in_traceback and not self._is_under_warning and not any(sign in text for sign in _SIGNS):
            return ""
        text = _RANK.sub("", _COLOUR.sub("", text) if "\x1b" in text else text, count=1)
        is_under_warning, self._is_under_warning = self._is_under_warning, False
        if is_under_warning and text.startswith("  "):
            return "warning"
        if self._is_in_traceback and text.startswith((" ", "\t")):
            return "error"
        is_after_calls, self._is_in_traceback = self._is_in_traceback, bool(_TRACEBACK.match(text))
        if self._is_in_traceback or _FATAL.match(text) or (is_after_calls and _LAST_OF_A_TRACEBACK.match(text)):
            return "error"
        if "arning: " in text and _PYTHON_WARNING.match(text):
            self._is_under_warning = True
            return "warning"
        return _of_level(text) or ("bar" if "/" in text and METER.search(text) else "")


def _of_level(text: str) -> Meaning:
    """The meaning of the level that a logger has written, if it is one of those known."""
    if found := _GLOG.match(text) or _TENSORFLOW.match(text):
        return _ALARMS.get(found[1], "")
    if any(level in text for level in _LOWER_LEVELS) and (found := _BRACKETED.search(text, 0, 60)):
        return _ALARMS[found[1][0].upper()]
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
    return _ALARMS.get(found[1][0], "") if is_level else ""


# A line longer than this is shown cut; the run's folder keeps all of it.
LONGEST_SHOWN = 16_384
# The end of a prompt that waits for input: `name? `, `(Pdb) `, `>>> `; longer ones are none.
_PROMPTS = (b"? ", b": ", b") ", b"> ", b"$ ", b"] ")
_LONGEST_PROMPT = 500
# What a nested bar ends its drawing with: the cursor goes up again, and a terminal draws over the line.
_UP = b"\x1b[A"
# torch's warning on a network whose addresses have no names (socket.cpp), which go on to be connected by their numbers.
_NAMELESS_PEER = b"[c10d] The hostname of the client socket cannot be retrieved. err="

_Decoder = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True)
class OutputLine:
    """A piece of output: `text` without its line end; `open` where the line has not ended yet; what it means."""

    text: str
    open: bool = False
    meaning: Meaning = ""


def shown(raw: bytes) -> str:
    r"""A line's bytes as text: after the last carriage return that something follows, undecodable bytes as `\xNN`, cut if very long."""
    raw = raw.rstrip(b"\r")
    if b"\r" in raw:
        raw = raw[raw.rindex(b"\r") + 1 :]
    # not final: a character of several bytes that the cut falls into is left out
    text = _Decoder("backslashreplace").decode(raw[:LONGEST_SHOWN], final=len(raw) <= LONGEST_SHOWN)
    if len(raw) > LONGEST_SHOWN:
        text += f" … ({len(raw):,} bytes)"
    return text


def shown_lines(raws: Iterable[bytes]) -> list[str]:
    """Lines as they are shown; what a nested bar draws is none, since a terminal would lose it, nor is a warning without harm."""
    return [shown(raw) for raw in raws if not (raw.endswith(_UP) or (raw.startswith(b"[W") and _NAMELESS_PEER in raw))]


class LineAssembler:
    """Takes a stream's bytes as they come, and gives whole lines, and open ones that the next one replaces."""

    # What stands after the last newline is held back, unless it holds a carriage return (a progress bar) or ends as a prompt does.

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        # of these, what stands after the last carriage return: what a terminal would show
        self._current: list[bytes] = []
        self._meanings = LineClassifier()

    def feed(self, data: bytes) -> tuple[bytes, list[OutputLine]]:
        """The raw bytes of all lines that are complete now, and the lines to show."""
        head, newline, rest = data.rpartition(b"\n")
        if not newline:
            return b"", self._hold(data)
        complete = b"".join((*self._parts, head, newline))
        self._parts, self._current = [], []
        lines = [self._line(text) for text in shown_lines(complete[:-1].split(b"\n"))]
        return complete, lines + self._hold(rest)

    def close(self) -> tuple[bytes, list[OutputLine]]:
        """The bytes that were held back, as a line: the stream has ended."""
        rest = b"".join(self._parts)
        self._parts, self._current = [], []
        return (rest + b"\n", [self._line(shown(rest))]) if rest else (b"", [])

    def _line(self, text: str) -> OutputLine:
        return OutputLine(text, meaning=self._meanings.of(text))

    def _hold(self, data: bytes) -> list[OutputLine]:
        """Hold back what has not ended; a bar or a prompt is also given as an open line."""
        if not data:
            return []
        self._parts.append(data)
        self._current.append(data)
        if b"\r" not in data and not (data.endswith(_PROMPTS) and sum(map(len, self._current)) <= _LONGEST_PROMPT):
            return []
        # the last one may stand at the end, and what it ends is still shown
        current = b"".join(self._current)
        self._current = [current[current.rfind(b"\r", 0, len(current.rstrip(b"\r"))) + 1 :]]
        return [OutputLine(shown(self._current[0]), open=True)]
