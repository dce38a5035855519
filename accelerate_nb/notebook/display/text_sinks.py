"""Sinks for plain text: a notebook's cell, or the two standard streams of a process."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TextIO, TypeAlias

from accelerate_nb.events.model import WIDGET_VIEW, Meaning, Stream
from accelerate_nb.events.terminal_lines import cleaned, coloured, plain

if TYPE_CHECKING:
    from rich.text import Text

    from accelerate_nb.events.rank_state import RankSummary
    from accelerate_nb.launching.front_end import RunHandle

LineStyle: TypeAlias = Meaning | Literal["title", "finished", "failed", "stopped"]

# Bright yellow is amber in a notebook; plain yellow can't be read on white there.
_COLOURS: dict[LineStyle, int] = {"warning": 93}


class LabelledLine(NamedTuple):
    """A line to write, without its newline: the label in front of it, the ranks that the label names if any, and what the line means."""

    stream: Stream
    text: str
    meaning: LineStyle = ""
    label: str = ""
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class OutputLimits:
    """Limits of a sink; `size` counts bytes of a saved notebook, `width` the characters of a line."""

    lines: float = float("inf")
    size: float = float("inf")
    width: int | None = None
    tail_lines: int = 0
    tail_size: int = 0
    displays: float = float("inf")


class TextSink:
    """
    Something that text is written on: here the standard streams as they go to a file, to another program or into a log.

    `bound` limits a run's output on it. It `redraws` what has not ended, or writes every line once; it `folds` equal lines of
    several ranks into one; it shows text, or displays of other kinds too.
    """

    bound = OutputLimits()
    redraws = folds = shows_displays = False

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._streams: dict[Stream, TextIO] = {"stdout": out or sys.stdout, "stderr": err or sys.stderr}
        for item in self._streams.values():
            reconfigure = getattr(item, "reconfigure", None)
            if reconfigure is not None:
                # what this encoding can't represent is written in ASCII
                reconfigure(errors="backslashreplace")

    def clean(self, text: str, stream: Stream) -> str:
        """A rank's text as this can show it, without what would disturb the lines of others."""
        return plain(text)

    def write(self, lines: Sequence[LabelledLine]) -> None:
        """Write whole lines, in this order. Raises `BrokenPipeError` where the reader has gone."""
        for stream, group in groupby(lines, key=lambda line: self._streams[line.stream]):
            self._write(stream, "".join(f"{self._painted(line)}\n" for line in group))

    def _painted(self, line: LabelledLine) -> str:
        return line.label + line.text

    def _write(self, stream: TextIO, text: str) -> None:
        stream.write(text)
        # one stream after the other: they may take different ways to the reader
        stream.flush()

    def board(self, run: RunHandle, ranks: Sequence[RankSummary], above: int) -> list[Text]:
        """Lines on the state of ranks, in colours and as many as fit below so many others; none where this has no place for them."""
        return []

    def show_open(self, texts: Sequence[str | Text]) -> None:
        """Show lines that have not ended yet in place of those that were shown before; none removes them."""

    def show(self, data: dict[str, Any], metadata: dict[str, Any], name: str = "", *, update: bool = False) -> None:
        """Show a MIME bundle as well as this can; under a name, or replacing the display of that name."""
        text = str(data.get("text/plain", f"<{', '.join(data)}>"))
        self.write([LabelledLine("stdout", line) for line in text.splitlines()])

    def abandon(self) -> None:
        """The reader has gone: what is still written, by the end of this process too, is dropped."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            for stream in self._streams.values():
                if not stream.isatty():
                    with suppress(OSError, ValueError):
                        os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)


def print_message(text: str) -> None:
    """Write a text as lines of standard output, at once."""
    TextSink().write([LabelledLine("stdout", line) for line in text.splitlines()])


class CellSink(TextSink):
    """
    A notebook's cell: lines that have not ended are one block, which is made when first needed and then updated.

    A browser draws thousands of lines slowly and the notebook's file keeps all of them, so the cell holds the beginning
    and the end of a long run, well under a megabyte.
    """

    redraws = shows_displays = True
    bound = OutputLimits(lines=2000, size=300_000, width=2000, tail_lines=40, tail_size=250_000, displays=100)

    def __init__(self) -> None:
        super().__init__()
        self._block: Any = None
        self._open = ""

    def clean(self, text: str, stream: Stream) -> str:
        return cleaned(text, self.bound.width)

    def write(self, lines: Sequence[LabelledLine]) -> None:
        # a page paints all of standard error as an alarm: what is none goes to standard output
        super().write([line._replace(stream="stderr" if line.meaning == "error" else "stdout") for line in lines])

    def _painted(self, line: LabelledLine) -> str:
        return coloured(line.label + line.text, _COLOURS.get(line.meaning))

    def show_open(self, texts: Sequence[str | Text]) -> None:
        wanted = "\n".join(str(text)[:250] for text in texts)
        if wanted == self._open:
            return
        self._open = wanted
        bundle = {"text/plain": wanted}
        if self._block is None:
            self._block = _display(bundle, display_id=True)
        else:
            self._block.update(bundle, raw=True)

    def show(self, data: dict[str, Any], metadata: dict[str, Any], name: str = "", *, update: bool = False) -> None:
        # a widget's model is in its own process: the notebook has none for such a view
        bundle = {mime_type: value for mime_type, value in data.items() if mime_type != WIDGET_VIEW}
        under = {"display_id": name, "update": update} if name else {}
        _display(bundle, metadata=metadata, **under)


def _display(bundle: dict[str, Any], **options: Any) -> Any:
    from IPython.display import display

    return display(bundle, raw=True, **options)  # type: ignore[no-untyped-call]  # IPython leaves it without types
