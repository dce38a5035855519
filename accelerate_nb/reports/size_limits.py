"""Text that has to fit: what it costs in a notebook's file, and how it is cut."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

# The bytes with which a saved notebook surrounds a line of output: indentation, quotes, a comma.
_PER_LINE = 14
_WIDEST = 2000


def saved_size(text: str) -> int:
    """
    The most bytes that a text takes in a notebook's file.

    Jupyter writes a letter as it is and a control character with six bytes; others write any letter beyond ASCII with six.
    """
    return len(json.dumps(text)) + _PER_LINE * (text.count("\n") + 1)


def newest_fitting(lines: Sequence[str], room: int, made: Callable[[str], str] = str) -> list[str]:
    """The last lines, as `made` writes them, that take no more than `room` bytes of a notebook's file."""
    fitting: list[str] = []
    for line in reversed(lines):
        text = made(line)
        room -= saved_size(text)
        if room < 0:
            break
        fitting.append(text)
    return fitting[::-1]


def narrowed(line: str, width: int = _WIDEST) -> str:
    """A line of at most this many characters, which says how many more there were."""
    return line if len(line) <= width else f"{line[:width]} … ({len(line) - width:,} more characters)"


def shortened(text: str, room: int) -> str:
    """A text of at most about `room` characters: its beginning and, the larger part, its end, each line narrowed."""
    lines = [narrowed(line) for line in text.split("\n")]
    if sum(map(len, lines)) + len(lines) <= room:
        return "\n".join(lines)
    first = _taken(lines, room // 3)
    last = _taken(lines[len(first) :][::-1], room - room // 3)[::-1]
    left_out = len(lines) - len(first) - len(last)
    return "\n".join([*first, f"… {left_out:,} lines left out …", *last])


def _taken(lines: Sequence[str], room: int) -> list[str]:
    """The first of these lines that fit, in characters."""
    taken: list[str] = []
    for line in lines:
        room -= len(line) + 1
        if room < 0:
            break
        taken.append(line)
    return taken


def fitted(text: str, room: int, made: Callable[[str], str] = str) -> str:
    """A text, shortened until it takes, as `made` writes it, no more than `room` bytes of a notebook's file."""
    length = len(text)
    while saved_size(made(text)) > room:
        length = length * 2 // 3
        if length < 40:
            return ""
        text = shortened(text, length)
    return text


def first_fitting(parts: Sequence[str], room: int) -> list[str]:
    """The first of these parts that take no more than `room` bytes of a notebook's file."""
    fitting: list[str] = []
    for part in parts:
        room -= saved_size(part)
        if room < 0:
            break
        fitting.append(part)
    return fitting
