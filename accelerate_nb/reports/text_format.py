"""Numbers and texts as a person reads them, and as they fit: values, bytes, times, ranks, lines that are cut."""

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from accelerate_nb.config.rank_lists import spans

T = TypeVar("T")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
# The bytes with which a saved notebook surrounds a line of output: indentation, quotes, a comma.
_PER_LINE = 14
_WIDEST = 2000


def value_text(value: float) -> str:
    """A number in four digits or so: `0.6518`, `1.27e-4`, `12345`."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-3:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    if value == int(value):
        return str(int(value))
    return f"{value:.1f}" if size >= 1000 else f"{value:.4g}"


def bytes_text(used: float, total: float | None = None) -> str:
    """Bytes, alone or of so many, in the unit of the larger: `55.0/80.0 GiB`."""
    largest = max(used, total or 0)
    unit = min(int(math.log(largest, 1024)) if largest >= 1 else 0, len(_UNITS) - 1)
    parts = [used] if total is None else [used, total]
    digits = 0 if unit == 0 else 1
    return "/".join(f"{part / 1024**unit:.{digits}f}" for part in parts) + f" {_UNITS[unit]}"


def time_text(seconds: float) -> str:
    """A length of time as a clock shows it: `00:14`, `1:02:03`, `2 d 01:00:00`."""
    whole = max(int(seconds), 0)
    days, rest = divmod(whole, 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, seconds_left = divmod(rest, 60)
    if days:
        return f"{days} d {hours:02}:{minutes:02}:{seconds_left:02}"
    if hours:
        return f"{hours}:{minutes:02}:{seconds_left:02}"
    return f"{minutes:02}:{seconds_left:02}"


def ago_text(then: float, now: float) -> str:
    """A moment as a person names it, both in seconds since 1970: `12 min ago`, and the date where it is a day ago or more."""
    seconds = max(int(now - then), 0)
    if seconds >= 86_400:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(then))
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length} {unit} ago"
    return f"{seconds} s ago"


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks, those that follow each other as a span: `0–2, 5`."""
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in spans(sorted(ranks)))


def counted(number: int, noun: str) -> str:
    """A number of things: `1 line`, `1,200 lines`, `2 processes`."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def left_out(count: int, shown: int, noun: str) -> list[str]:
    """The line below the first things of `count`, of which so many are shown; none where all of them are."""
    return [f"… {counted(count - shown, f'more {noun}')} not shown here"] if count > shown else []


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of a table as lines, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def saved_size(text: str) -> int:
    """The most bytes that a text takes in a notebook's file, where a control character or any letter beyond ASCII may take six."""
    return len(json.dumps(text)) + _PER_LINE * (text.count("\n") + 1)


def newest_fitting(lines: Sequence[T], size_limit: int, made: Callable[[T], str] = str) -> list[str]:
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
