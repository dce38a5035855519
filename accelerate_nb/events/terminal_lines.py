"""The lines of one rank among those of others, without control characters that disturb them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import accumulate
from unicodedata import east_asian_width

from accelerate_nb.events.model import LogLine, Progress

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


def coloured(text: str, colour: int | None) -> str:
    """A line in one of a terminal's colours, if it has none of its own."""
    return text if colour is None or "\x1b[" in text else f"\x1b[{colour}m{text}{_RESET}"


def within(text: str, columns: int) -> str:
    """The beginning of a text that takes no more than these columns; characters of East Asia take two."""
    if text.isascii():
        return text[:columns]
    ends = accumulate(2 if east_asian_width(char) in "WF" else 1 for char in text)
    return "".join(char for char, end in zip(text, ends, strict=True) if end <= columns)


# What tqdm draws by default: ` 40%|####  | 4/10 [00:01<00:02, 3.1it/s]`, without a total `4it [00:01, ...`.
METER = re.compile(r"(\d+%\|.*\| *\S+/\S+|\d\S*) \[\d[\d:]*(<|, )")


def draws_a_bar(line: LogLine, bars: Iterable[Progress]) -> bool:
    """
    Whether an open line is one of the bars of its rank, so that who shows those need not show the line too.

    Every tqdm bar in a worker is a `Progress` (`worker/tqdm_hook.py`), and still drawn as text: an open line of its rank's
    standard error, which stays in the rank's log.

    >>> bar = Progress(0, "epoch 1", 4, 10, time=0.0)
    >>> draws_a_bar(LogLine(0, "stderr", "epoch 1:  40%|####  | 4/10 [00:01<00:02, 3.1it/s]", 0.0, open=True), [bar])
    True
    """
    return line.open and METER.search(line.text) is not None and any(bar.rank == line.rank for bar in bars)
