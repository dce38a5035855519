"""A word of our own to the person, in the cell that runs at this moment."""

from __future__ import annotations

from accelerate_nb.notebook.screens import Line, Pipe


def say(text: str) -> None:
    """Write a text as lines of standard output, at once."""
    Pipe().write([Line("stdout", line) for line in text.splitlines()])
