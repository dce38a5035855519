"""How a process's bytes become lines: split at newlines, never inside one, whatever the bytes are."""

from __future__ import annotations

from dataclasses import dataclass

# A line longer than this is shown cut; the run's folder keeps all of it.
LONGEST_SHOWN = 16_384


@dataclass(frozen=True, slots=True)
class Line:
    """A piece of output: `text` without its line end; `open` where the line has not ended yet."""

    text: str
    open: bool = False


def shown(raw: bytes) -> str:
    r"""A line's bytes as text: after the last carriage return that something follows, undecodable bytes as `\xNN`, cut if very long."""
    raw = raw.rstrip(b"\r")
    if b"\r" in raw:
        raw = raw[raw.rindex(b"\r") + 1 :]
    text = raw[:LONGEST_SHOWN].decode(errors="backslashreplace")
    if len(raw) > LONGEST_SHOWN:
        text += f" … ({len(raw):,} bytes)"
    return text


class LineAssembler:
    """
    Takes a stream's bytes as they come, and gives whole lines.

    What stands after the last newline is held back until its end arrives; where it holds a carriage return (a progress
    bar) it is given as an open line each time, so that the next one can replace it.
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def feed(self, data: bytes) -> tuple[bytes, list[Line]]:
        """The raw bytes of all lines that are complete now, and the lines to show."""
        head, newline, rest = data.rpartition(b"\n")
        if not newline:
            self._parts.append(data)
            return b"", self._opened(data)
        complete = b"".join((*self._parts, head, newline))
        self._parts = [rest] if rest else []
        lines = [Line(shown(raw)) for raw in complete[:-1].split(b"\n")]
        return complete, lines + self._opened(rest)

    def close(self) -> tuple[bytes, list[Line]]:
        """What was held back, as a line: the stream has ended."""
        rest = b"".join(self._parts)
        self._parts = []
        return (rest + b"\n", [Line(shown(rest))]) if rest else (b"", [])

    def _opened(self, news: bytes) -> list[Line]:
        if b"\r" not in news:
            return []
        self._parts = [b"".join(self._parts)]
        return [Line(shown(self._parts[0]), open=True)]
