"""Text of ranks without what a terminal or a page would do something about, and the lines of one rank among those of others."""

import re
from collections.abc import Iterable
from itertools import accumulate
from unicodedata import east_asian_width

from accelerate_nb.events.event_types import LogLine, Progress

# Colours (group 1); what moves a cursor, rings a bell, names a window or talks to the terminal; all other control characters, those of
# eight bits and lone escapes among them; marks that turn the direction of what follows; and what no encoding of text has.
SEQUENCE = re.compile(
    r"\x1b\[([0-9;:]*)m|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"
    r"|\x1b[ -/]*[0-~]?|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufffe\uffff]"
)
_SURROGATES = re.compile(r"[\ud800-\udfff]")
_RESET = "\x1b[0m"


def plain(text: str) -> str:
    """A text without colours, and without what would disturb a reader's terminal or a page; its lines stay lines."""
    return text if text.isprintable() else legible(SEQUENCE.sub("", text))


def plain_name(text: str) -> str:
    """A name, which is one line, as `plain` has it."""
    return text if text.isprintable() else " ".join(plain(text).split())


def legible(text: str) -> str:
    """A text that every encoding of text can hold."""
    return _SURROGATES.sub("\ufffd", text)


def cleaned(text: str, width: int | None) -> str:
    """A rank's text, cut to a width, with its colours and without what else would disturb the lines of others."""
    if width is not None and len(text) > width:
        text = f"{text[:width]} ... ({len(text) - width:,} more characters are in the run's folder)"
    if text.isprintable():
        return text
    text = legible(SEQUENCE.sub(lambda found: "" if found[1] is None else found[0], text))
    return text + _RESET if "\x1b[" in text and not text.endswith(_RESET) else text


def coloured(text: str, colour: int | str | None) -> str:
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
    """Whether an open line is one of the bars of its rank, so that who shows those need not show the line too."""
    # every tqdm bar in a worker is a `Progress` (`worker/tqdm_hook.py`), and still drawn as text on its rank's standard error
    return line.open and METER.search(line.text) is not None and any(bar.rank == line.rank for bar in bars)
