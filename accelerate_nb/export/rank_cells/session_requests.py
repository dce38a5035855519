"""The session that a notebook's cells request, which a script's processes are for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate_nb.config.formats import literal
from accelerate_nb.config.run_config import all_settings

# How a notebook shows a session; a terminal has ways of its own.
_OF_NOTEBOOKS = frozenset({"panel", "report"})
# Settings that a session adopts from the next cell on, without a restart.
_FOLLOWED = frozenset({"panel", "report", "hang_warning_after", "stop_grace_period", "log_line_prefix_template"})


@dataclass
class SessionRequests:
    """The session that the cells, one after the other, request."""

    first: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    stopped: tuple[int, int] | None = None

    def ready(self, cell: int, settings: Mapping[str, Any] | None = None, *, restart: bool = False) -> str | None:
        """The reason why a cell can't have the session that it requests."""
        known = {setting.name: setting.default for setting in all_settings()}
        settings = settings or {}
        if self.first is None:
            self.first = cell
            self.settings.update(settings)
            return None
        if restart:
            return "the session would restart here, and the variables of a script's processes can't be forgotten"
        for name, now in settings.items():
            was = self.settings.get(name, known[name])
            if now != was and name not in _FOLLOWED:
                return (
                    f"the session would restart here ({name} was {was} and is {now} now), and a script's processes "
                    "stay the same. Set it in the first %%accelerate cell"
                )
        self.settings.update(settings)
        return None

    def needed(self) -> str:
        """The settings, as the text of a call's arguments."""
        shared = {name: value for name, value in self.settings.items() if name not in _OF_NOTEBOOKS}
        return ", ".join(f"{name}={literal(value)}" for name, value in shared.items())
