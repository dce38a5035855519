"""A comparison of runs that shows itself in a notebook."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from accelerate_nb.notebook.display.message_feed import MOST_POINTS, series_rows
from accelerate_nb.notebook.page.mount_script import script
from accelerate_nb.reports.history.comparison import Comparison
from accelerate_nb.reports.history.comparison_html import comparison_html
from accelerate_nb.reports.history.comparison_text import comparison_lines
from accelerate_nb.reports.size_limits import saved_size

# A saved notebook holds at most 300 kB of it, with what the notebook's format puts around it.
_SIZE_LIMIT = 295_000


@dataclass(frozen=True, slots=True, repr=False)
class ComparedRuns:
    """
    Runs beside each other, as HTML where a notebook shows it, otherwise as text; where scripts run, the curves are the panel's charts.

    >>> runs("train_1", "train_2").comparison.settings
    (('mixed_precision', ('default', 'bf16')),)
    """

    comparison: Comparison

    def __repr__(self) -> str:
        return "\n".join(comparison_lines(self.comparison))

    def _repr_html_(self) -> str:
        identity = "\0".join(f"{run.folder}\0{run.state}" for run in self.comparison.runs)
        charts_id = "accelerate-nb-runs-" + hashlib.sha256(identity.encode(errors="replace")).hexdigest()[:12]
        made = comparison_html(self.comparison, charts_id)
        if not self.comparison.metrics:
            return made
        rows = list(series_rows(self.comparison.overlay, MOST_POINTS))
        message = {"seq": 1, "reset": True, "names": list(self.comparison.labels), "metrics": rows}
        size_limit = _SIZE_LIMIT - saved_size(made) - saved_size(repr(self))
        return made + "\n" + script(charts_id, [message], size_limit, with_code=True, entry="comparison")
