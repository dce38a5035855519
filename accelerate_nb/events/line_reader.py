"""The lines of a process's output: split at newlines, never inside a line, whatever the bytes are."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from dataclasses import dataclass

from accelerate_nb.events.meaning import LineClassifier
from accelerate_nb.events.model import Meaning

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
    """
    Takes a stream's bytes as they come, and gives whole lines.

    What stands after the last newline is held back until its end arrives; where it holds a carriage return (a progress
    bar), or ends as a prompt does, it is given as an open line each time, so that the next one can replace it.
    """

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
