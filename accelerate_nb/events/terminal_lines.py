"""How the line of one rank stands among those of others without disturbing them."""

from __future__ import annotations

import re
from itertools import accumulate
from unicodedata import east_asian_width

from accelerate_nb.events.model import LogLine

# Colours pass; what moves a cursor or rings a bell would disturb the lines of other ranks.
_DISTURBING = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-ln-~]|\x1b[ -/]*[0-Z\\^-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f]"
)
_RESET = "\x1b[0m"


def cleaned(text: str, width: int | None) -> str:
    """A rank's text, cut to a width, without what would disturb the lines of others."""
    if width is not None and len(text) > width:
        text = f"{text[:width]} ... ({len(text) - width:,} more characters are in the run's folder)"
    text = _DISTURBING.sub("", text)
    return text + _RESET if "\x1b[" in text and not text.endswith(_RESET) else text


def is_drawn_over(line: LogLine) -> bool:
    """Whether a terminal would lose the line: a nested progress bar ends with the cursor going up, its newline comes back."""
    return not line.open and line.text.endswith("\x1b[A")


def within(text: str, columns: int) -> str:
    """The beginning of a text that takes no more than these columns; letters of East Asia take two."""
    if text.isascii():
        return text[:columns]
    ends = accumulate(2 if east_asian_width(letter) in "WF" else 1 for letter in text)
    return "".join(letter for letter, end in zip(text, ends, strict=True) if end <= columns)
