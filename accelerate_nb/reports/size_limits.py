"""Text that has to fit: what it costs in a notebook's file, and how it is cut."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

# The bytes with which a saved notebook surrounds a line of output: indentation, quotes, a comma.
_PER_LINE = 14
_WIDEST = 2000
T = TypeVar("T")


def saved_size(text: str) -> int:
    """
    The most bytes that a text takes in a notebook's file.

    Jupyter writes a letter as it is and a control character with six bytes; others write any letter beyond ASCII with six.
    """
    return len(json.dumps(text)) + _PER_LINE * (text.count("\n") + 1)


def newest_fitting(lines: Sequence[str], size_limit: int, made: Callable[[str], str] = str) -> list[str]:
    """The last lines, as `made` writes them, that take no more than `size_limit` bytes of a notebook's file."""
    return first_fitting(map(made, reversed(lines)), size_limit)[::-1]


def narrowed(line: str, width: int = _WIDEST) -> str:
    """A line of at most this many characters, with the number of those left out."""
    return line if len(line) <= width else f"{line[:width]} … ({len(line) - width:,} more characters)"


def shortened(text: str, size_limit: int) -> str:
    """A text of at most about `size_limit` characters: its beginning and, the larger part, its end, each line narrowed."""
    lines = [narrowed(line) for line in text.split("\n")]
    if sum(map(len, lines)) + len(lines) <= size_limit:
        return "\n".join(lines)
    first = first_within(lines, size_limit // 3, lambda line: len(line) + 1)
    rest = reversed(lines[len(first) :])
    last = first_within(rest, size_limit - size_limit // 3, lambda line: len(line) + 1)[::-1]
    left_out = len(lines) - len(first) - len(last)
    return "\n".join([*first, f"… {left_out:,} lines left out …", *last])


def fitted(text: str, size_limit: int, made: Callable[[str], str] = str) -> str:
    """A text, shortened until it takes, as `made` writes it, no more than `size_limit` bytes of a notebook's file."""
    length = len(text)
    while saved_size(made(text)) > size_limit:
        length = length * 2 // 3
        if length < 40:
            return ""
        text = shortened(text, length)
    return text


def first_fitting(parts: Iterable[str], size_limit: int) -> list[str]:
    """The first of these parts that take no more than `size_limit` bytes of a notebook's file."""
    return first_within(parts, size_limit, saved_size)


def first_within(items: Iterable[T], size_limit: int, size_of: Callable[[T], int]) -> list[T]:
    """The first of these items whose sizes add up to no more than `size_limit`."""
    fitting: list[T] = []
    for item in items:
        size_limit -= size_of(item)
        if size_limit < 0:
            break
        fitting.append(item)
    return fitting
