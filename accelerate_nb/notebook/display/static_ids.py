"""Ids of reports in a notebook that is kept in git: the same whenever it runs."""

from __future__ import annotations

import hashlib


class StaticIds:
    """
    Ids of the elements of static reports: of the cell, and of how many runs it has shown since it began.

    >>> static_ids.new(cell_id(), cell_now())
    """

    def __init__(self) -> None:
        self._cell_run, self._count = "", 0

    def new(self, cell: str, cell_run: str) -> str:
        """The id of the next report of a cell, in this run of it; empty where the page does not send the cell's id."""
        self._count = self._count + 1 if cell_run == self._cell_run else 1
        self._cell_run = cell_run
        digest = hashlib.sha256(f"{cell}\0{self._count}".encode()).hexdigest()[:12]
        return f"accelerate-nb-{digest}" if cell else ""
