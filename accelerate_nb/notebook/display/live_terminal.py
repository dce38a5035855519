"""A terminal as a sink: the lines of a run, and below them, drawn over by rich, what has not ended and the state of each rank."""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from operator import attrgetter
from typing import TextIO

from rich.console import Console, ConsoleDimensions, Group
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType, Segment, Segments
from rich.text import Text

from accelerate_nb.config.rank_lists import named
from accelerate_nb.events.event_types import Stream
from accelerate_nb.events.run_state import RankSummary, logged_names
from accelerate_nb.events.terminal_lines import cleaned, coloured, plain
from accelerate_nb.launching.run import Run
from accelerate_nb.notebook.display.text_output import LabelledLine, LineStyle, TextSink
from accelerate_nb.reports.summary import SIGNS, SummaryRow, ranks_of_nodes, row_of
from accelerate_nb.reports.text_format import bytes_text, counted, narrowed, time_text

# More ranks than these are shown in groups of one state.
_MOST_RANKS = 8
_MOST_METRICS = 4
_STATES = {"running": "", "failed": "bold red", "finished": "green"}
# Distinct on light and on dark backgrounds; red is for failures.
_RANKS = {"cyan": 36, "magenta": 35, "green": 32, "yellow": 33, "blue": 34, "bright_magenta": 95}
_COLOURS: dict[LineStyle, str] = {
    "bar": "2",
    "warning": "33",
    "error": "31",
    "title": "1",
    "finished": "1;32",
    "failed": "1;31",
    "stopped": "1;33",
}


class TerminalSink(TextSink):
    """Standard streams of which at least one is a terminal; what is drawn stands below all lines, if possible on standard error."""

    redraws = True

    def __init__(self, out: TextIO, err: TextIO, drawn_on: TextIO, *, has_colours: bool) -> None:
        super().__init__(out, err)
        with suppress(OSError, ValueError, AttributeError):
            if out.isatty() and err.isatty() and os.ttyname(out.fileno()) == os.ttyname(err.fileno()):
                # on one terminal they are one, in which nothing else comes between what is written at once
                self._streams["stdout"] = err
        self.folds = out.isatty() and err.isatty()
        self._drawn_on, self._has_colours = drawn_on, has_colours
        self._console = _VisibleCursor(
            file=drawn_on,
            force_terminal=True,
            force_jupyter=False,
            width=80,
            height=24,
            color_system="standard" if has_colours else None,
        )
        self._live: Live | None = None
        self._drawn: list[Text] = []

    def clean(self, text: str, stream: Stream) -> str:
        return cleaned(text, None) if self._streams[stream].isatty() else plain(text)

    def _painted(self, line: LabelledLine) -> str:
        if not (self._has_colours and self._streams[line.stream].isatty()):
            return line.label + line.text
        if not line.ranks:  # the label says it, or the line where there is none
            return coloured(line.label or line.text, _COLOURS.get(line.meaning)) + (line.text if line.label else "")
        # the label of several ranks has no colour, and is bold
        code = [*_RANKS.values()][line.ranks[0] % len(_RANKS)] if len(line.ranks) == 1 else 1
        label = f"\x1b[{code}m{line.label}\x1b[0m" if line.label else ""
        return label + coloured(line.text, _COLOURS.get(line.meaning))

    def _write(self, stream: TextIO, text: str) -> None:
        if self._live is None or stream is not self._drawn_on:
            super()._write(stream, text)
            return
        self._erase_wrapped()
        # in one piece: a terminal never shows the moment in which the old is gone and the new has not come
        self._console.print(Segments([Segment(text)]), end="", soft_wrap=True)

    def board(self, run: Run, ranks: Sequence[RankSummary], above: int) -> list[Text]:
        columns, rows = self._measure()
        return board_lines(run, ranks, columns=columns, rows=max(rows - 1 - above, 1))

    def show_open(self, texts: Sequence[str | Text]) -> None:
        columns, rows = self._measure()
        # the last column stays free, where some terminals go on to the next line; what has left at the top can't be drawn over
        drawn = [self._fitting(text, columns - 1) for text in texts[: max(rows - 1, 1)]]
        if drawn == self._drawn:
            return
        self._erase_wrapped()
        self._drawn = drawn
        if self._live is None:
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
                vertical_overflow="crop",
            )
            self._live.start()
        if drawn:
            # whatever else writes to this terminal begins in a line of its own
            self._live.update(Group(*drawn, Text()), refresh=True)
        else:
            self._live.stop()
            self._live = None

    def _measure(self) -> tuple[int, int]:
        """The columns and rows of the terminal at this moment."""
        with suppress(OSError, ValueError):
            columns, rows = os.get_terminal_size(self._drawn_on.fileno())
            self._console.size = ConsoleDimensions(columns or 80, rows or 24)
        return self._console.size

    def _fitting(self, text: str | Text, columns: int) -> Text:
        text = text.copy() if isinstance(text, Text) else Text(plain(text))
        encoding = self._drawn_on.encoding or "utf-8"
        shown = text.plain.encode(encoding, "backslashreplace").decode(encoding)
        if shown != text.plain:  # what this terminal's encoding lacks takes more columns
            text = Text(shown)
        text.truncate(max(columns, 1), overflow="crop")
        return text

    def _erase_wrapped(self) -> None:
        """Erase the rows that lines take beside their first, in a terminal that has become narrower."""
        columns, _ = self._measure()
        if rows := sum(max(text.cell_len - 1, 0) // columns for text in self._drawn):
            self._console.control(Control(*((ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)) * rows))

    def abandon(self) -> None:
        self._live, self._drawn = None, []
        super().abandon()


class _VisibleCursor(Console):
    """A console that leaves the cursor as it is: a process that is killed could not show it again."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


# --------------------------------------------------------------------------------------------------------------------- board


def board_lines(run: Run, ranks: Sequence[RankSummary], *, columns: int, rows: int) -> list[Text]:
    """A line for the run and at least one for each rank, or for each group of ranks in one state: of a node, or of all."""
    names = logged_names(name for rank in ranks for name in rank.metrics)[:_MOST_METRICS]
    made = [*_rank_lines([[rank] for rank in ranks], names, columns)] if len(ranks) <= _MOST_RANKS else []
    state = attrgetter("state")
    for nodes in (run.view.nodes, ()):
        if not made or len(made) >= rows:
            of_nodes = (sorted(members, key=state) for _, members in ranks_of_nodes(ranks, nodes))
            groups = [list(group) for members in of_nodes for _, group in groupby(members, key=state)]
            made = [*_rank_lines(groups, names, columns)]
    parts = [narrowed(plain(run.name), 60), counted(len(ranks), "rank"), time_text(time.time() - run.started)]
    if (host := run.view.host) is not None:
        parts += [f"CPU {host.cpu:.0f}%", f"memory {bytes_text(*host.memory)}"]
    lines = [Text("  ".join(parts), style="dim"), *made][:rows]
    for text in lines:
        text.truncate(max(columns - 1, 1), overflow="ellipsis")
    return lines


def _rank_lines(groups: Iterable[Sequence[RankSummary]], names: Sequence[str], columns: int) -> Iterator[Text]:
    for group in groups:
        style = [*_RANKS][group[0].rank % len(_RANKS)] if len(group) == 1 else "bold"
        label = Text(f"[{named(item.rank for item in group)}] ", style=style)
        yield from _wrapped(label, [*_parts(group[0].state, row_of(group, names), names)], columns - 1)


def _parts(state: str, row: SummaryRow, names: Sequence[str]) -> Iterator[Text]:
    if state != "running" or not row.progress:
        yield Text(f"{SIGNS[state]} {state}", style=_STATES.get(state, "yellow"))
    for bar in row.progress if state in {"running", "stopping"} else ():
        text = Text(bar)
        text.highlight_regex("[█░]+", "cyan")
        yield text
    for name, value in zip(names, row.values, strict=True):
        if value:
            yield Text.assemble((f"{narrowed(plain(name), 30)} ", "dim"), (value, "bold"))
    yield from (Text(device, style="dim") for device in row.devices[:2])


def _wrapped(label: Text, parts: Sequence[Text], width: int) -> Iterator[Text]:
    """A label and its parts, in as many lines as they need; what is below the first is indented."""
    line, indent, filled = label, " " * len(label.plain), False
    for part in parts:
        if filled and line.cell_len + 2 + part.cell_len > width:
            yield line
            line, filled = Text(indent), False
        if filled:
            line.append("  ")
        line.append_text(part)
        filled = True
    yield line
