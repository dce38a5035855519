"""Tables of runs that a notebook shows: the kept ones, whose rows open where a page's widgets work, and those that are compared."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import Any

from accelerate_nb.notebook.display.message_feed import MOST_POINTS, series_rows
from accelerate_nb.notebook.display.run_display import frontend_state
from accelerate_nb.notebook.display.select import display_settings, display_way
from accelerate_nb.notebook.host import host
from accelerate_nb.reports.history.comparison import Comparison, comparison_html, comparison_lines
from accelerate_nb.reports.history.run_table import RunTable


class ListedRuns(RunTable):
    """
    Runs, the newest first, as `runs()` gives them.

    >>> runs()[0].state
    'running'
    """

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": repr(self), "text/html": self.html(self._opened_table() if self else "")}

    def _opened_table(self) -> str:
        """The id of the table whose rows a page opens; empty where none can."""
        if not _shows_widgets():
            return ""
        from accelerate_nb.notebook.display.run_browser import RunBrowser

        browser = RunBrowser(self, host(os.environ).service or "jupyter")
        frontend_state().keep(browser)
        return browser.element_id


@dataclass(frozen=True, slots=True, repr=False)
class ComparedRuns:
    """
    Runs beside each other, as HTML where a notebook shows it, otherwise as text; where widgets work, the curves are the panel's charts.

    >>> runs("train_1", "train_2").comparison.settings
    (('mixed_precision', ('default', 'bf16')),)
    """

    comparison: Comparison

    def __repr__(self) -> str:
        return "\n".join(comparison_lines(self.comparison))

    def _repr_html_(self) -> str:
        identity = "\0".join(f"{run.folder}\0{run.state}" for run in self.comparison.runs)
        charts_id = "accelerate-nb-runs-" + hashlib.sha256(identity.encode(errors="replace")).hexdigest()[:12]
        if self.comparison.metrics and _shows_widgets():
            from accelerate_nb.notebook.display.run_browser import ComparisonCharts

            rows = list(series_rows(self.comparison.overlay, MOST_POINTS))
            message = {"seq": 1, "reset": True, "names": list(self.comparison.labels), "metrics": rows}
            frontend_state().keep(ComparisonCharts(charts_id, message))
        return comparison_html(self.comparison, charts_id)


def _shows_widgets() -> bool:
    return display_way(display_settings(), host(os.environ)) == "panel"
