"""Text of ranks on a notebook's cell or the two standard streams: labelled, in order, equal output once where that is wanted, and bounded."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TextIO, TypeAlias

from accelerate_nb.config.rank_lists import named, of_ranks
from accelerate_nb.events.collapse import CollapsedOutput, OutputCollapser, folded, is_text, key_of
from accelerate_nb.events.event_types import WIDGET_VIEW, Display, LogLine, Meaning, Shown, Stream
from accelerate_nb.events.run_folder import shown_path
from accelerate_nb.events.run_state import RankSummary, RunState
from accelerate_nb.events.terminal_lines import cleaned, coloured, draws_a_bar, plain
from accelerate_nb.reports.text_format import first_within, saved_size

if TYPE_CHECKING:
    from rich.text import Text

    from accelerate_nb.launching.run import Run

LineStyle: TypeAlias = Meaning | Literal["title", "finished", "failed", "stopped"]

# Bright yellow is amber in a notebook; plain yellow can't be read on white there.
_COLOURS: dict[LineStyle, int] = {"warning": 93}
_PER_SWITCH = 150  # bytes with which a saved notebook surrounds an output of another stream
_OPEN_LINES, _OPEN_LINES_ABOVE_A_BOARD = 32, 8
# The lines times ranks that are folded in one go: more would delay the output noticeably.
_MOST_FOLDED = 60_000


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
    """Something that text is written on: here the standard streams as they go to a file, to another program or into a log."""

    # it redraws what has not ended, or writes every line once; it folds equal lines of several ranks into one
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

    def board(self, run: Run, ranks: Sequence[RankSummary], above: int) -> list[Text]:
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
    """A notebook's cell: lines that have not ended are one block, which is made when first needed and then updated."""

    redraws = shows_displays = True
    # a browser draws thousands of lines slowly, and the file keeps all of them: the beginning and the end, well under a megabyte
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


class OutputWriter:
    """Writes the output of ranks from a `cursor` of their view on, within the limits of the sink."""

    def __init__(
        self,
        sink: TextSink,
        view: RunState,
        folder: Path,
        *,
        ranks: Sequence[int],
        size: int,
        only: Sequence[int] | None = None,
        cursor: int = 0,
        folds: bool = False,
        labels: bool = True,
        prefix_template: str | None = None,
        leading: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cursor = cursor
        self._sink, self._view, self._clock = sink, view, clock
        self._name, self._folder = folder.name, shown_path(folder)
        self._ranks, self._only, self._leading, self._labels = tuple(ranks), only, leading, labels
        # of `role_name`, `local_rank` and `rank`, as in torchelastic
        self._template = None if prefix_template is None else Template(prefix_template)
        self._width = len(f"[{named(range(size))}] ") if folds else 0
        self._folding = OutputCollapser(ranks) if folds else None
        # a terminal's; a cell has lines of status alone
        self.has_board = sink.redraws and not sink.shows_displays
        self._is_full = False
        self._lines_left, self._size_left, self._displays_left = sink.bound.lines, sink.bound.size, sink.bound.displays
        waiting = Counter(item.rank for item in view.since(cursor).items if isinstance(item, LogLine))
        # lines of each rank that were written, or reported as left out
        self._accounted = Counter({rank: view.line_count_of(rank) - waiting[rank] for rank in view.ranks})
        self._seen_open: set[tuple[int, Stream]] = set()
        self._shown: set[Hashable] = set()
        self._left_out: set[int] = set()
        self._last_stream: Stream = "stdout"

    def write(self, *, is_last: bool = False) -> None:
        """Write what is new; with `is_last` also what waits for the same of other ranks."""
        news = self._view.since(self.cursor)
        self.cursor = news.cursor
        if news.skipped and not self._is_full:
            self.note(f"{news.skipped:,} lines came faster than they could be shown; they are in {self._folder}")
        self._put(self._in_order(news.items, is_last=is_last))

    def finish(self) -> None:
        """Write all that is left: lines without an end, and where the limit was reached the last lines of each rank."""
        self.write(is_last=True)
        self._sink.show_open(())
        # a bar that a board has shown is known by what follows it
        bars = {rank.rank: [*rank.progress.values()] for rank in self._view.glances()}
        last = [line for line in self._view.open_lines() if not (self.has_board and draws_a_bar(line, bars[line.rank]))]
        self._sink.write([line for output in self._folded(last) for line in self._labelled(output)])
        self._write_tails()
        if self._left_out:
            self.note(f"displays of {of_ranks(sorted(self._left_out))} are left out; --displays all shows them")

    def put(self, displays: Iterable[Display]) -> None:
        """Write values that are in no view."""
        self._put(self._in_order([*displays], is_last=True))

    def note(self, text: str) -> None:
        """Write a message about the run, among the lines of its ranks."""
        self._sink.write([_note(text)])

    def shows(self, rank: int) -> bool:
        """Whether output of this rank is written."""
        return self._only is None or rank in self._only

    def label(self, ranks: Sequence[int]) -> str:
        """The label of these ranks."""
        name = named(ranks)
        if self._template is not None:
            return self._template.safe_substitute(role_name="default", local_rank=name, rank=name)
        return f"[{name}] ".ljust(self._width) if self._labels else ""

    def open_lines(self, ranks: Sequence[RankSummary]) -> list[str]:
        """The lines that were open a moment ago already, since what only waits for its newline is no progress bar."""
        lines = [(rank, line) for rank in ranks for line in rank.open_lines]
        # a board shows the bars
        now = [line for rank, line in lines if not (self.has_board and draws_a_bar(line, rank.progress.values()))]
        lasting = [line for line in now if (line.rank, line.stream) in self._seen_open]
        self._seen_open = {(line.rank, line.stream) for line in now}
        made = (line for output in self._folded(lasting) for line in self._labelled(output))
        texts = [line.label + line.text for line in made]
        most = _OPEN_LINES_ABOVE_A_BOARD if self.has_board else _OPEN_LINES
        if len(texts) > most:
            texts[most:] = [f"... and {len(texts) - most} more"]
        return texts

    # ------------------------------------------------------------------------------------------------------------- lines

    def _in_order(self, shown: Sequence[Shown], *, is_last: bool) -> Iterator[CollapsedOutput]:
        shown = [item for item in shown if self.shows(item.rank)]
        is_flood = len(shown) * len(self._ranks) > _MOST_FOLDED
        if self._folding is not None:
            if not is_flood:
                self._folding.take(shown, self._clock())
            yield from self._folding.rest() if is_last or is_flood else self._folding.ready(self._clock())
        if self._folding is None or is_flood:
            yield from (CollapsedOutput((item.rank,), item) for item in shown)

    def _folded(self, lines: Sequence[LogLine]) -> list[CollapsedOutput]:
        shown = [line for line in lines if self.shows(line.rank)]
        return [CollapsedOutput((line.rank,), line) for line in shown] if self._folding is None else folded(shown)

    def _put(self, outputs: Iterable[CollapsedOutput]) -> None:
        batch: list[LabelledLine] = []
        every = [*outputs]
        # of several updates that came together, the last one counts
        newest = {self._display_id(item): item for _, item in every if isinstance(item, Display) and item.update}
        for output in every:
            item = output.item
            if isinstance(item, LogLine) or is_text(item) or not self._sink.shows_displays:
                if self._add(output, batch) and isinstance(item, LogLine):
                    self._accounted.update(output.ranks)
                continue
            self._sink.write(batch)
            batch = []
            if not item.update:
                self._show(output.ranks, item)
            elif newest[self._display_id(item)] is item and self._leading in (None, *output.ranks):
                self._sink.show(item.data, item.metadata, self._display_id(item), update=True)
        self._sink.write(batch)

    def _add(self, output: CollapsedOutput, batch: list[LabelledLine]) -> bool:
        """Add output to what is to be written, within the limit; beyond it, a note once."""
        if self._is_full:
            return False
        lines = self._labelled(output)
        if self._sink.bound != OutputLimits():
            cost = 0
            for line in lines:
                # the bytes that it takes in a saved notebook
                switch = 0 if line.stream == self._last_stream else _PER_SWITCH
                cost += saved_size(line.label + line.text) + switch
                self._last_stream = line.stream
            if self._lines_left < len(lines) or self._size_left < cost:
                self._is_full = True
                batch.append(_note(f"a cell holds no more; all lines of each rank are in {self._folder}"))
                return False
            self._lines_left -= len(lines)
            self._size_left -= cost
        batch.extend(lines)
        return True

    def _labelled(self, output: CollapsedOutput) -> list[LabelledLine]:
        """Output as lines with their label; a line of nothing but cursor movements is none."""
        item, label = output.item, self.label(output.ranks)
        if isinstance(item, LogLine):
            text = self._sink.clean(item.text, item.stream)
            return [LabelledLine(item.stream, text, item.meaning, label, output.ranks)] if text or not item.text else []
        parts = str(item.data.get("text/plain", f"<{', '.join(item.data)}>")).splitlines()
        texts = [self._sink.clean(part, "stdout") for part in parts]
        # one value over several lines keeps its shape
        labels = [label, *([" " * len(label) if self._folding is not None else label] * len(texts))]
        return [LabelledLine("stdout", text, "", head, output.ranks) for head, text in zip(labels, texts, strict=False)]

    def _write_tails(self) -> None:
        """The last lines of each rank of which not all were written, where the limit was reached."""
        bound, tails = self._sink.bound, list[LogLine]()
        for rank in filter(self.shows, self._view.ranks) if self._is_full else ():
            missing = self._view.line_count_of(rank) - self._accounted[rank]
            last = self._view.tail(rank, min(missing, bound.tail_lines))
            limit = bound.tail_size // max(len(self._ranks), 1)
            fitting = first_within(reversed(last), limit, self._size)[::-1]
            if left_out := missing - len(fitting):
                text = f"... {left_out:,} lines are only in {self._folder} ..."
                tails.append(LogLine(rank, "stdout", text, fitting[0].time if fitting else 0.0))
            tails += fitting
            self._accounted[rank] += missing
        if self._folding is None:
            outputs: Iterable[CollapsedOutput] = (CollapsedOutput((line.rank,), line) for line in tails)
        else:
            self._folding.take(tails, self._clock())
            outputs = self._folding.rest()
        self._sink.write([line for output in outputs for line in self._labelled(output)])

    def _size(self, line: LogLine) -> int:
        """The most bytes that a line of a rank's log takes in a saved notebook."""
        labelled = self._labelled(CollapsedOutput((line.rank,), line))
        return sum(saved_size(item.label + item.text) + _PER_SWITCH for item in labelled)

    # ---------------------------------------------------------------------------------------------------------- displays

    def _show(self, ranks: tuple[int, ...], display: Display) -> None:
        """Show something rich under its label, if it is one to show."""
        if self._leading not in (None, *ranks):
            if key_of(display) not in self._shown:
                self._left_out.update(ranks)
            return
        self._shown.add(key_of(display))
        if self._leading is not None and ranks != self._ranks:
            ranks = (self._leading,)
        if self._displays_left < 1:
            return
        self._displays_left -= 1
        self._sink.write([LabelledLine("stdout", self.label(ranks).rstrip())])
        self._sink.show(display.data, display.metadata, self._display_id(display))
        if self._displays_left < 1:
            self.note(f"a cell shows no more; the other displays are in {self._folder}")

    def _display_id(self, display: Display) -> str:
        """The display id in the notebook, if the display may be updated."""
        return f"{self._name}-{display.rank}-{display.name}" if display.name else ""


def _note(text: str) -> LabelledLine:
    return LabelledLine("stderr", f"... {text} ...")
