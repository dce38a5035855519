"""The two standard streams of a process, and a few lines below them that a terminal redraws."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import NamedTuple, TextIO
from unicodedata import east_asian_width

from accelerate_nb.events.model import Meaning, Stream

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# Terminals that can't move a cursor call themselves so.
_DUMB = frozenset({"", "dumb", "unknown"})


class LabelledLine(NamedTuple):
    """A line to write, with its label and without its newline, and what it means."""

    stream: Stream
    text: str
    meaning: Meaning = ""


class StandardStreams:
    """
    Standard output and standard error, each a terminal or not.

    The `drawn` lines are below all others, on standard error where that is a terminal, so that standard output can go
    elsewhere. A reader that has gone raises `BrokenPipeError`.
    """

    def __init__(self, out: TextIO, err: TextIO, environment: Mapping[str, str]) -> None:
        # on one terminal they are one, in which nothing else comes between what is written at once
        self._streams: dict[Stream, TextIO] = {"stdout": err if _are_same(out, err) else out, "stderr": err}
        can_move = environment.get("TERM", "") not in _DUMB
        self._board = next((item for item in (err, out) if can_move and item.isatty()), None)
        self.has_colours = self._board is not None and not environment.get("NO_COLOR")
        self._drawn: list[str] = []
        for item in (out, err):
            reconfigure = getattr(item, "reconfigure", None)
            if reconfigure is not None:
                # what this encoding can't represent is written in ASCII
                reconfigure(errors="backslashreplace")

    @property
    def draws(self) -> bool:
        """Whether lines can be drawn, and drawn over."""
        return self._board is not None

    def is_terminal(self, stream: Stream) -> bool:
        """Whether a person reads this stream as it is written, colours and all."""
        return self._board is not None and self._streams[stream].isatty()

    @property
    def size(self) -> tuple[int, int]:
        """The columns and the lines of the terminal that is drawn on."""
        with suppress(OSError, ValueError):
            if self._board is not None:
                columns, lines = os.get_terminal_size(self._board.fileno())
                return columns or 80, lines or 24
        return 80, 24

    def write(self, lines: Sequence[LabelledLine], drawn: Sequence[str] | None = None) -> None:
        """Write whole lines in this order, and what is drawn below them; without `drawn`, what was there stays."""
        wanted = self._drawn if drawn is None else list(drawn)
        if not lines and wanted == self._drawn:
            return
        texts = [*self._erased(), *((self._streams[line.stream], f"{line.text}\n") for line in lines)]
        if self._board is not None:
            texts += [(self._board, f"{text}\n") for text in wanted]
        self._drawn = wanted
        for _, group in groupby(texts, key=lambda item: id(item[0])):
            # in one piece: a terminal never shows the moment in which the old is gone and the new has not come
            pieces = list(group)
            stream = pieces[0][0]
            stream.write("".join(text for _, text in pieces))
            # one stream after the other: they may take different ways to the reader
            stream.flush()

    def _erased(self) -> Iterator[tuple[TextIO, str]]:
        if self._board is not None and self._drawn:
            columns, _ = self.size
            # a terminal that has become narrower shows a line in several rows
            rows = sum(max(1, -(-_columns(text) // columns)) for text in self._drawn)
            yield self._board, f"\x1b[{rows}A\r\x1b[J"

    def abandon(self) -> None:
        """The reader has gone: what is still written, by the end of this process too, is dropped."""
        self._drawn = []
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            for stream in self._streams.values():
                if not stream.isatty():
                    with suppress(OSError, ValueError):
                        os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)


def _are_same(out: TextIO, err: TextIO) -> bool:
    """Whether both streams are the same terminal."""
    try:
        return out.isatty() and err.isatty() and os.ttyname(out.fileno()) == os.ttyname(err.fileno())
    except (OSError, ValueError, AttributeError):
        return False


def _columns(text: str) -> int:
    """The number of columns of a text; colours take none, characters of East Asia two."""
    shown = _COLOUR.sub("", text)
    return len(shown) if shown.isascii() else sum(2 if east_asian_width(char) in "WF" else 1 for char in shown)
