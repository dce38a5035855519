"""The tracker that needs nothing installed: what is logged is shown in the notebook's panel."""

from __future__ import annotations

import math
import time
from typing import Any, ClassVar

from accelerate_nb.events.model import Metric
from accelerate_nb.rank.event_sink import emit, outlet
from accelerate_nb.rank.metric_log import note_logged, numbers_of
from accelerate_nb.runtime.trackers.base import GeneralTracker
from accelerate_nb.runtime.trackers.values import plain
from accelerate_nb.runtime.world.registry import current_world


class PanelTracker(GeneralTracker):
    """
    Shows the numbers of every process that logs in the run's display; always on, and silent without a display.

    Strings, lists and pictures are not shown; names in nested dictionaries are joined by a slash.
    """

    name: ClassVar[str] = "panel"
    requires_logging_directory: ClassVar[bool] = False
    main_process_only = False

    @property
    def tracker(self) -> PanelTracker:
        """The tracker itself: there is nothing underneath."""
        return self

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.log_at(time.time(), values, step)

    def log_at(self, now: float, values: dict[str, Any], step: int | None = None) -> None:
        """Show values as those of a moment."""
        if outlet() is None:
            # a tensor on a device is waited for only where its value is shown
            return
        rank = current_world().rank
        count = plain(step)
        shown_step = int(count) if isinstance(count, (int, float)) and math.isfinite(count) else None
        numbers = dict(numbers_of(values))
        note_logged(numbers)
        for name, value in numbers.items():
            emit(Metric(rank, name, value, shown_step, now))
