"""A comparison of runs that shows itself in a notebook."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate_nb.reports.history.comparison import Comparison
from accelerate_nb.reports.history.comparison_html import comparison_html
from accelerate_nb.reports.history.comparison_text import comparison_lines


@dataclass(frozen=True, slots=True, repr=False)
class ComparedRuns:
    """
    Runs beside each other, as HTML where a notebook shows it, otherwise as text.

    >>> runs("train_1", "train_2").comparison.settings
    (('mixed_precision', ('default', 'bf16')),)
    """

    comparison: Comparison

    def __repr__(self) -> str:
        return "\n".join(comparison_lines(self.comparison))

    def _repr_html_(self) -> str:
        return comparison_html(self.comparison)
