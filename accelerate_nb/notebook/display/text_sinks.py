"""Where plain text can go: a notebook's cell, a terminal, or a pipe."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, Protocol

from accelerate_nb.events.lines import within
from accelerate_nb.events.model import WIDGET_VIEW, Stream

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Line(NamedTuple):
    """A line to write, with its label and without its newline."""

    stream: Stream
    text: str


@dataclass(frozen=True, slots=True)
class Bound:
    """How much a screen should hold; `size` counts bytes of a saved notebook, `width` the characters of a line."""

    lines: float = float("inf")
    size: float = float("inf")
    width: int | None = None
    tail_lines: int = 0
    tail_size: int = 0
    displays: float = float("inf")


class Screen(Protocol):
    """Something that text can be written on."""

    @property
    def bound(self) -> Bound:
        """How much of a run should be written on it."""

    @property
    def redraws(self) -> bool:
        """Whether lines that have not ended can be shown, and drawn over."""

    def write(self, lines: Sequence[Line]) -> None:
        """Write whole lines, in this order."""

    def show_open(self, texts: Sequence[str]) -> None:
        """Show lines that have not ended yet in place of those that were shown before; none removes them."""

    def show(self, data: dict[str, Any], metadata: dict[str, Any], name: str = "", *, update: bool = False) -> None:
        """Show a MIME bundle as well as the screen can; under a name, or in the place of what was shown under it."""


class Pipe:
    """A plain script's standard streams, going to a file or another program: lines that have not ended are not shown."""

    bound = Bound()
    redraws = False

    def write(self, lines: Sequence[Line]) -> None:
        for stream, text in _by_stream(lines):
            out = sys.stdout if stream == "stdout" else sys.stderr
            out.write(text)
            out.flush()  # one after the other: the two streams take different ways to the reader

    def show_open(self, texts: Sequence[str]) -> None:
        pass

    def show(self, data: dict[str, Any], metadata: dict[str, Any], name: str = "", *, update: bool = False) -> None:
        text = str(data.get("text/plain", f"<{', '.join(data)}>"))
        self.write([Line("stdout", line) for line in text.splitlines()])


class Terminal(Pipe):
    """A terminal: lines that have not ended stand at the bottom and are drawn over."""

    redraws = True

    def __init__(self) -> None:
        self._open: list[str] = []

    def write(self, lines: Sequence[Line]) -> None:
        if not lines:
            return
        self._erase()
        super().write(lines)
        self._draw()

    def show_open(self, texts: Sequence[str]) -> None:
        columns, lines = shutil.get_terminal_size()
        # what has left the screen at its top can't be drawn over
        wanted = [within(_COLOUR.sub("", text), columns - 1) for text in texts[: max(lines - 1, 1)]]
        if wanted == self._open:
            return
        self._erase()
        self._open = wanted
        self._draw()

    def _erase(self) -> None:
        if self._open:
            sys.stdout.write(f"\x1b[{len(self._open)}A\x1b[J")
            sys.stdout.flush()

    def _draw(self) -> None:
        if self._open:
            sys.stdout.write("".join(f"{text}\n" for text in self._open))
            sys.stdout.flush()


class Cell(Pipe):
    """
    A notebook's cell: lines that have not ended are one block, which is made when first needed and then updated.

    A browser draws thousands of lines slowly and the notebook's file keeps all of them, so the cell holds the beginning
    and the end of a long run, well under a megabyte.
    """

    redraws = True
    bound = Bound(lines=2000, size=300_000, width=2000, tail_lines=40, tail_size=250_000, displays=100)

    def __init__(self) -> None:
        self._block: Any = None
        self._open = ""

    def show_open(self, texts: Sequence[str]) -> None:
        wanted = "\n".join(text[:250] for text in texts)
        if wanted == self._open:
            return
        self._open = wanted
        bundle = {"text/plain": wanted}
        if self._block is not None:
            self._block.update(bundle, raw=True)
            return
        self._block = _display(bundle, display_id=True)

    def show(self, data: dict[str, Any], metadata: dict[str, Any], name: str = "", *, update: bool = False) -> None:
        # a widget lives in its own process: the notebook has no model behind such a view
        bundle = {kind: value for kind, value in data.items() if kind != WIDGET_VIEW}
        under = {"display_id": name, "update": update} if name else {}
        _display(bundle, metadata=metadata, **under)


def _display(bundle: dict[str, Any], **options: Any) -> Any:
    from IPython.display import display

    return display(bundle, raw=True, **options)  # type: ignore[no-untyped-call]  # IPython leaves it without types


def _by_stream(lines: Sequence[Line]) -> Iterator[tuple[Stream, str]]:
    """Neighbouring lines of one stream as one text: a kernel sends a message for each write."""
    for stream, group in groupby(lines, key=lambda line: line.stream):
        yield stream, "".join(f"{line.text}\n" for line in group)
