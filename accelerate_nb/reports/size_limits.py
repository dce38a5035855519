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


def newest_fitting(lines: Sequence[str], size_limit: int, made: Callable[[str], str] = str) -> list[str]:
    """The last lines, as `made` writes them, that take no more than `size_limit` bytes of a notebook's file."""
    fitting: list[str] = []
    for line in reversed(lines):
        text = made(line)
        size_limit -= saved_size(text)
        if size_limit < 0:
            break
        fitting.append(text)
    return fitting[::-1]


def narrowed(line: str, width: int = _WIDEST) -> str:
    """A line of at most this many characters, with the number of those left out."""
    return line if len(line) <= width else f"{line[:width]} … ({len(line) - width:,} more characters)"


def shortened(text: str, size_limit: int) -> str:
    """A text of at most about `size_limit` characters: its beginning and, the larger part, its end, each line narrowed."""
    lines = [narrowed(line) for line in text.split("\n")]
    if sum(map(len, lines)) + len(lines) <= size_limit:
        return "\n".join(lines)
    first = _taken(lines, size_limit // 3)
    last = _taken(lines[len(first) :][::-1], size_limit - size_limit // 3)[::-1]
    left_out = len(lines) - len(first) - len(last)
    return "\n".join([*first, f"… {left_out:,} lines left out …", *last])


def _taken(lines: Sequence[str], size_limit: int) -> list[str]:
    """The first of these lines that fit, in characters."""
    taken: list[str] = []
    for line in lines:
        size_limit -= len(line) + 1
        if size_limit < 0:
            break
        taken.append(line)
    return taken


def fitted(text: str, size_limit: int, made: Callable[[str], str] = str) -> str:
    """A text, shortened until it takes, as `made` writes it, no more than `size_limit` bytes of a notebook's file."""
    length = len(text)
    while saved_size(made(text)) > size_limit:
        length = length * 2 // 3
        if length < 40:
            return ""
        text = shortened(text, length)
    return text


def first_fitting(parts: Sequence[str], size_limit: int) -> list[str]:
    """The first of these parts that take no more than `size_limit` bytes of a notebook's file."""
    fitting: list[str] = []
    for part in parts:
        size_limit -= saved_size(part)
        if size_limit < 0:
            break
        fitting.append(part)
    return fitting
