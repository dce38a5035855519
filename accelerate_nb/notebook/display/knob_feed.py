"""The part of a panel's messages that is about knobs: their values, and the changes that charts mark."""

from __future__ import annotations

from typing import Any

from accelerate_nb.events.model import KnobValue
from accelerate_nb.events.run_state import RunState


class KnobFeed:
    """Follows the knobs of a run's view for one panel: `news()` holds the changes since the last call."""

    def __init__(self, view: RunState) -> None:
        self._view = view
        self._knobs: dict[str, KnobValue] = {}
        self._changes: tuple[KnobValue, ...] = ()

    def news(self) -> dict[str, list[Any]]:
        """`knobs` as name, value and bounds of those that are new, `knob_changes` as name, value and time of all; empty without news."""
        knobs, changes = self._view.knobs(), self._view.knob_changes
        new = [knob for name, knob in knobs.items() if self._knobs.get(name) is not knob]
        message: dict[str, list[Any]] = {}
        if new:
            message["knobs"] = [[knob.name, knob.value, knob.least, knob.most] for knob in new]
        if changes != self._changes:
            message["knob_changes"] = [[change.name, change.value, change.time] for change in changes]
        self._knobs, self._changes = knobs, changes
        return message
