"""The lines below a run's output in a terminal: where each rank is now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

from accelerate_nb.config.rank_lists import named
from accelerate_nb.events.metric_names import logged_names
from accelerate_nb.events.model import HostSample, NodeRanks
from accelerate_nb.events.rank_state import RankSummary
from accelerate_nb.events.terminal_lines import plain
from accelerate_nb.reports.summary import SIGNS, SummaryRow, ranks_of_nodes, row_of
from accelerate_nb.reports.text_format import bytes_text, counted, narrowed, time_text

if TYPE_CHECKING:
    from rich.text import Text

# More ranks than these are shown in groups of one state.
_MOST_RANKS = 8
_MOST_METRICS = 4
_STATES = {"running": "", "failed": "bold red", "finished": "green"}
# Distinct on light and on dark backgrounds; red is for failures.
_RANKS = ("cyan", "magenta", "green", "yellow", "blue", "bright_magenta")
_CODES = {"cyan": 36, "magenta": 35, "green": 32, "yellow": 33, "blue": 34, "bright_magenta": 95}


class StatusBoard:
    """
    Makes the lines that show the state of a run, within the given columns and rows.

    >>> StatusBoard(has_colours=False).lines("train.py", 12.0, ranks, None, columns=80, rows=10)
    ['train.py  2 ranks  00:12', '[0] train ██████░░░░░░ 30/60 10 it/s 00:03  loss 0.65', ...]
    """

    def __init__(self, *, has_colours: bool) -> None:
        from rich.console import Console

        # what is made here is drawn by others, on a terminal that they know
        self._console = Console(
            file=StringIO(), force_terminal=True, color_system="standard" if has_colours else None, width=100_000
        )
        self._has_colours = has_colours

    def lines(
        self,
        name: str,
        seconds: float,
        ranks: Sequence[RankSummary],
        host: HostSample | None,
        nodes: Sequence[NodeRanks] = (),
        *,
        columns: int,
        rows: int,
    ) -> list[str]:
        """A line for the run and at least one for each rank, or for each group of ranks in one state: of a node, or of all."""
        head = _head(name, seconds, ranks, host)
        names = logged_names(name for rank in ranks for name in rank.metrics)[:_MOST_METRICS]
        made = [*self._rank_lines([[rank] for rank in ranks], names, columns)] if len(ranks) <= _MOST_RANKS else []
        for grouped_by in (nodes, ()):
            if not made or len(made) >= rows:
                made = [*self._rank_lines(_by_state(ranks, grouped_by), names, columns)]
        return [self._drawn(text, columns) for text in [head, *made][:rows]]

    def _rank_lines(
        self, groups: Iterable[Sequence[RankSummary]], names: Sequence[str], columns: int
    ) -> Iterator[Text]:
        for group in groups:
            yield from _wrapped(_label(group), [*_parts(group[0].state, row_of(group, names), names)], columns - 1)

    def _drawn(self, text: Text, columns: int) -> str:
        # the last column stays free: some terminals go on to the next line there
        text.truncate(max(columns - 1, 1), overflow="ellipsis")
        if not self._has_colours:
            return text.plain
        with self._console.capture() as drawn:
            self._console.print(text, end="", soft_wrap=True)
        return drawn.get()


def _by_state(ranks: Sequence[RankSummary], nodes: Sequence[NodeRanks]) -> Iterator[list[RankSummary]]:
    state = attrgetter("state")
    for _, members in ranks_of_nodes(ranks, nodes):
        yield from (list(group) for _, group in groupby(sorted(members, key=state), key=state))


def dyed(label: str, ranks: Sequence[int]) -> str:
    """A label in its rank's colour; that of several ranks has none, and is bold."""
    code = _CODES[_RANKS[ranks[0] % len(_RANKS)]] if len(ranks) == 1 else 1
    return f"\x1b[{code}m{label}\x1b[0m"


def _head(name: str, seconds: float, ranks: Sequence[RankSummary], host: HostSample | None) -> Text:
    from rich.text import Text

    parts = [narrowed(plain(name), 60), counted(len(ranks), "rank"), time_text(seconds)]
    if host is not None:
        parts += [f"CPU {host.cpu:.0f}%", f"memory {bytes_text(*host.memory)}"]
    return Text("  ".join(parts), style="dim")


def _label(group: Sequence[RankSummary]) -> Text:
    from rich.text import Text

    style = _RANKS[group[0].rank % len(_RANKS)] if len(group) == 1 else "bold"
    return Text(f"[{named(item.rank for item in group)}] ", style=style)


def _parts(state: str, row: SummaryRow, names: Sequence[str]) -> Iterator[Text]:
    from rich.text import Text

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
    from rich.text import Text

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
