"""The one copy of the panel's code among the reports of a notebook."""

from __future__ import annotations

import sys
from typing import Any


class CodeCopy:
    """
    The cell whose report holds the panel's code, which the other reports of the notebook use.

    It is the cell of the first run that ended in this kernel. Once that cell runs again, it is that of the next run
    to end. A report of a cell without an id holds a copy of its own.

    >>> code_copy.belongs_to(cell_id())
    """

    def __init__(self) -> None:
        self._cell = ""
        self._is_watching = False

    def belongs_to(self, cell: str) -> bool:
        """Whether the report of this cell holds the code."""
        if not cell:
            return True
        if not self._cell:
            self._cell = cell
            self._watch()
        return self._cell == cell

    def _watch(self) -> None:
        shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        if shell is not None and not self._is_watching:
            self._is_watching = True
            shell.events.register("pre_run_cell", self._forget)

    def _forget(self, info: Any) -> None:
        """A cell that runs again loses its outputs."""
        if getattr(info, "cell_id", None) == self._cell:
            self._cell = ""
