"""Sinks for plain text: a notebook's cell, a terminal, or a pipe."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from accelerate_nb.events.model import WIDGET_VIEW, Meaning
from accelerate_nb.events.terminal_lines import coloured, within
from accelerate_nb.reports.standard_streams import LabelledLine, StandardStreams

# Bright yellow is amber in a notebook; plain yellow can't be read on white there.
_COLOURS: dict[Meaning, int] = {"warning": 93}
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class OutputLimits:
    """Limits of a screen; `size` counts bytes of a saved notebook, `width` the characters of a line."""

    lines: float = float("inf")
    size: float = float("inf")
    width: int | None = None
    tail_lines: int = 0
    tail_size: int = 0
    displays: float = float("inf")


class TextSink(Protocol):
    """Something that text can be written on."""

    @property
    def bound(self) -> OutputLimits:
        """The limits of a run's output on it."""

    @property
    def redraws(self) -> bool:
        """Whether lines that have not ended can be shown, and drawn over."""

    def write(self, lines: Sequence[LabelledLine]) -> None:
        """Write whole lines, in this order."""

    def show_open(self, texts: Sequence[str]) -> None:
        """Show lines that have not ended yet in place of those that were shown before; none removes them."""

    def show(self, data: dict[str, Any], metadata: dict[str, Any], name: str = "", *, update: bool = False) -> None:
        """Show a MIME bundle as well as the screen can; under a name, or replacing the display of that name."""


class PipeSink:
    """A plain script's standard streams, going to a file or another program: lines that have not ended are not shown."""

    bound = OutputLimits()
    redraws = False

    def write(self, lines: Sequence[LabelledLine]) -> None:
        StandardStreams(sys.stdout, sys.stderr, {}).write(lines)

    def show_open(self, texts: Sequence[str]) -> None:
        pass

    def show(self, data: dict[str, Any], metadata: dict[str, Any], name: str = "", *, update: bool = False) -> None:
        text = str(data.get("text/plain", f"<{', '.join(data)}>"))
        self.write([LabelledLine("stdout", line) for line in text.splitlines()])


class TerminalSink(PipeSink):
    """A terminal: lines that have not ended stand at the bottom and are drawn over."""

    def __init__(self) -> None:
        self._streams = StandardStreams(sys.stdout, sys.stderr, os.environ)
        self.redraws = self._streams.draws

    def write(self, lines: Sequence[LabelledLine]) -> None:
        self._streams.write(lines)

    def show_open(self, texts: Sequence[str]) -> None:
        columns, lines = self._streams.size
        # what has left the screen at its top can't be drawn over
        self._streams.write((), [within(_COLOUR.sub("", text), columns - 1) for text in texts[: max(lines - 1, 1)]])


class CellSink(PipeSink):
    """
    A notebook's cell: lines that have not ended are one block, which is made when first needed and then updated.

    A browser draws thousands of lines slowly and the notebook's file keeps all of them, so the cell holds the beginning
    and the end of a long run, well under a megabyte.
    """

    redraws = True
    bound = OutputLimits(lines=2000, size=300_000, width=2000, tail_lines=40, tail_size=250_000, displays=100)

    def __init__(self) -> None:
        self._block: Any = None
        self._open = ""

    def write(self, lines: Sequence[LabelledLine]) -> None:
        # a page paints all of standard error as an alarm: what is none goes to standard output
        dressed = ((line.meaning == "error", coloured(line.text, _COLOURS.get(line.meaning))) for line in lines)
        super().write([LabelledLine("stderr" if is_error else "stdout", text) for is_error, text in dressed])

    def show_open(self, texts: Sequence[str]) -> None:
        wanted = "\n".join(text[:250] for text in texts)
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
