"""Progress of an executed notebook in a terminal: the running cell, and its output."""

from __future__ import annotations

import re
import sys
from typing import Any

ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_WIDTH = 60


class CellProgress:
    """
    Prints the running cell to standard error, and passes on what it writes and shows, unless `quiet`.

    >>> progress = CellProgress(quiet=False)
    >>> progress.began(3, 12, "train()")
    cell 3 of 12: train()
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._at_line_start = True

    def began(self, number: int, of: int, source: str) -> None:
        """A cell begins: the one with this number, of so many."""
        first = next((line for line in source.splitlines() if line.strip() and not line.lstrip().startswith("#")), "")
        shown = first if len(first) <= _WIDTH else f"{first[: _WIDTH - 3]}..."
        self.report(f"cell {number} of {of}" + (f": {shown}" if shown else ""))

    def wrote(self, stream: str, text: str) -> None:
        """A cell has written something."""
        if not self._quiet and text:
            where = sys.stderr if stream == "stderr" else sys.stdout
            where.write(text if where.isatty() else ESCAPES.sub("", text))  # colours are for terminals
            where.flush()
            self._at_line_start = text.endswith(("\n", "\r"))

    def ended(self, outputs: list[Any]) -> None:
        """A cell is over: what it shows, as far as that is text, and the traceback of its error."""
        for output in outputs:
            if output["output_type"] == "error":
                self._block("stderr", "\n".join(output["traceback"]))
            elif text := output.get("data", {}).get("text/plain"):
                self._block("stdout", text)

    def report(self, line: str) -> None:
        """A line of this command's own."""
        self._block("stderr", line)

    def _block(self, stream: str, text: str) -> None:
        if text.strip():
            self.wrote(stream, ("" if self._at_line_start else "\n") + text.rstrip("\n") + "\n")
