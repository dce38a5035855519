"""Which options a script has: the assignments of the cell tagged `parameters`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Parameter:
    """An option of a script: `--learning-rate` for `learning_rate = 1e-3  # how far a step goes`."""

    name: str
    type: str  # `float`, `list[int]`, `str | None`: as an annotation spells it
    default: str  # as the cell spells it
    help: str = ""
