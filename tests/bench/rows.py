"""What a benchmark measured, and how it is told: to a person, or to a program."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One measurement: the median of its rounds, and its ratio to what it is compared with."""

    name: str
    value: float
    unit: str
    ratio: float | None = None
    beside: str = ""


def json_of(rows: Sequence[Row], load: float, **more: Any) -> str:
    """What was measured, for a program; `more` says more of it."""
    return json.dumps({"load": load, **more, "rows": [asdict(row) for row in rows]}, indent=2)


def markdown_of(rows: Sequence[Row]) -> str:
    """What was measured, as a table for the docs."""
    lines = ["| what | value | unit | compared |", "| --- | ---: | --- | --- |"]
    for row in rows:
        compared = "" if row.ratio is None else f"{row.ratio:.3f} × {row.beside}"
        value = f"{row.value:,.0f}" if row.value >= 1000 else f"{row.value:.4g}"
        lines.append(f"| {row.name} | {value} | {row.unit} | {compared} |")
    return "\n".join(lines)


def print_rows(
    rows: Sequence[Row], load: float, *, as_json: bool, about: str = "", decimals: int = 2, **more: Any
) -> None:
    """Print what was measured, with the load of the machine before; `about` says more of it, `more` says it to a program."""
    if as_json:
        print(json_of(rows, load, **more))
        return
    print("; ".join(filter(None, [f"load average at the beginning: {load:.2f}", about])))
    width = max(len(row.name) for row in rows)
    for row in rows:
        beside = "" if row.ratio is None else f"{row.ratio:>8.3f} x {row.beside}"
        print(f"{row.name:<{width}} {row.value:>12,.{decimals}f} {row.unit:<10} {beside}".rstrip())
