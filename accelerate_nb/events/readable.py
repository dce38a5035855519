"""What can be read of a run: what it is called, where it is kept, and all that has happened in it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from accelerate_nb.events.view import RunView


class Readable(Protocol):
    """A run that goes on or has ended, or what it left in its folder."""

    @property
    def name(self) -> str:
        """What a person calls the function that runs."""

    @property
    def why(self) -> str:
        """How many workers there are, what placed them, and why."""

    @property
    def folder(self) -> Path:
        """Where every rank's output is kept."""

    @property
    def view(self) -> RunView:
        """Everything that has happened so far."""

    @property
    def started(self) -> float:
        """When the run began, in seconds since 1970."""
