"""A cell as plain Python: what those who translate a cell give to those who write the script."""

from __future__ import annotations

from dataclasses import dataclass


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
    cell that is `left_out` is in the script as comments only. `on_ranks` are its `%%accelerate` line and its `%accelerate` lines.
    """

    source: str
    imports: tuple[str, ...] = ()
    notes: tuple[Remark, ...] = ()
    problems: tuple[Remark, ...] = ()
    left_out: bool = False
    on_ranks: tuple[Remark, ...] = ()
