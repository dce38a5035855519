"""The verbs that show how a training goes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from accelerate_nb.events.emit import emit
from accelerate_nb.events.model import Metric
from accelerate_nb.runtime.process import Process


class Watching(Process):
    """What an `Accelerator` tells whoever watches."""

    def init_trackers(self, project_name: str, config: Any = None, init_kwargs: Any = None) -> None:
        """Begin to track; there are no trackers here yet, and what `log` shows needs no beginning."""

    def log(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Show numbers to whoever watches the run."""
        now = time.time()
        for name, value in values.items():
            number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            if isinstance(number, (int, float)):
                emit(Metric(self.world.rank, name, float(number), step, now))
