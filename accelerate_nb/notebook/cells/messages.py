"""Messages of this package, in the output of the running cell."""

from __future__ import annotations

from accelerate_nb.notebook.display.text_sinks import PipeSink
from accelerate_nb.reports.standard_streams import LabelledLine


def print_message(text: str) -> None:
    """Write a text as lines of standard output, at once."""
    PipeSink().write([LabelledLine("stdout", line) for line in text.splitlines()])
