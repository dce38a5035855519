"""What does not change while a run is shown."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from accelerate_nb.events.view import RunView


class Told(Protocol):
    """What a report is made of: a run that goes on or has ended, or what it left in its folder."""

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


@dataclass(frozen=True, slots=True)
class Facts:
    """What does not change while a run is shown; `host`, `background` and `can_act` are for a page that shows it live."""

    name: str
    why: str
    folder: str
    started: float
    size: int
    host: str = "jupyter"
    background: bool = False
    can_act: bool = True

    @classmethod
    def of(cls, run: Told, host: str, *, background: bool, can_act: bool) -> Facts:
        """The facts of a run."""
        return cls(
            name=run.name,
            why=run.why,
            folder=str(run.folder),
            started=run.started,
            size=len(run.view.ranks),
            host=host,
            background=background,
            can_act=can_act,
        )

    def message(self) -> dict[str, Any]:
        """The facts as a page reads them."""
        return {name: getattr(self, name) for name in self.__slots__}
