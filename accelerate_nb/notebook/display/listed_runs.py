"""A table of runs that a notebook shows: in a page whose widgets work, its rows open."""

from __future__ import annotations

import os
from typing import Any

from accelerate_nb.notebook.display.run_display import frontend_state
from accelerate_nb.notebook.display.select import display_settings, display_way
from accelerate_nb.notebook.host import host
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
        mode, notebook_host = display_settings(), host(os.environ)
        if display_way(mode, notebook_host) != "panel":
            return ""
        from accelerate_nb.notebook.display.run_browser import RunBrowser

        browser = RunBrowser(self, notebook_host.service or "jupyter", mode.report)
        frontend_state().keep(browser)
        return browser.element_id
