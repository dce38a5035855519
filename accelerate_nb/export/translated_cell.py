"""A cell as plain Python: what those who translate a cell give to those who write the script."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from accelerate_nb.export.rank_cells.rng_streams import Whose


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """Options of an export."""

    keep_installs: bool = False  # `%pip install` and its like are run by the script too


@dataclass(frozen=True, slots=True)
class Remark:
    """A remark on a line of a cell; lines count from 1."""

    line: int
    text: str


@dataclass(frozen=True, slots=True)
class PlainCell:
    """
    A cell without IPython's own syntax.

    `source` has exactly as many lines as the cell. `imports` are whole statements (`from accelerate_nb.script.display import
    shown`) that have to stand somewhere above it. A problem keeps the notebook from being exported, a note is a warning. A
    cell that is `left_out` is in the script as comments only.
    """

    source: str
    imports: tuple[str, ...] = ()
    notes: tuple[Remark, ...] = ()
    problems: tuple[Remark, ...] = ()
    left_out: bool = False


@dataclass(frozen=True, slots=True)
class RankCells:
    """
    The translation of a notebook's `%%accelerate` and `%accelerate`.

    `cells` holds, by number, the cells that have such lines, as ordinary source with as many lines; `needed` is the argument
    text of `needed(...)` (`num_processes=2`); the accelerator is made before the cell `first`. `whose` holds, by number, which
    cells the ranks run, and which the notebook too.
    """

    cells: Mapping[int, PlainCell] = field(default_factory=dict)
    needed: str | None = None
    first: int | None = None
    whose: Mapping[int, Whose] = field(default_factory=dict)
    notes: tuple[tuple[int, Remark], ...] = ()  # with the number of the cell
    problems: tuple[tuple[int, Remark], ...] = ()
