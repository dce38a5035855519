"""Numbers as a person reads them: values, bytes, times, and ranks that follow each other."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

from accelerate_nb.config.rank_lists import spans

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_OLDEST = 1e9  # numbers above are times, in seconds since 1970


def value_text(value: float) -> str:
    """
    A number in four digits or so.

    >>> value_text(0.65184), value_text(0.000127), value_text(12345)
    ('0.6518', '1.27e-4', '12345')
    """
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
    """
    A moment as a person names it, both in seconds since 1970: the date where it is a day ago or more.

    >>> ago_text(0, 30), ago_text(0, 750), ago_text(0, 7500)
    ('30 s ago', '12 min ago', '2 h ago')
    """
    seconds = max(int(now - then), 0)
    if seconds >= 86_400:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(then))
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length} {unit} ago"
    return f"{seconds} s ago"


def ranks_text(ranks: Iterable[int]) -> str:
    """
    Ranks, those that follow each other as a span.

    >>> ranks_text([0, 1, 2, 5])
    '0–2, 5'
    """
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in spans(sorted(ranks)))


def counted(number: int, noun: str) -> str:
    """A number of things: `1 line`, `1,200 lines`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def rounded(value: Any) -> Any:
    """Data for JSON with six digits in each number, and times in hundredths of a second: a saved report holds thousands."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [*map(rounded, value)]
    if isinstance(value, float) and math.isfinite(value):
        return round(value, 2) if value > _OLDEST else float(f"{value:.6g}")
    return value
