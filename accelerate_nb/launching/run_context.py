"""The context of a run, which its worker groups share, and the ways to stop it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from accelerate_nb.events.model import Event, Failure
from accelerate_nb.events.run_folder import RunRecorder
from accelerate_nb.events.run_state import RunState
from accelerate_nb.launching.node_agent.fetched_logs import FetchedLogs
from accelerate_nb.sources.cells import CellSources
from accelerate_nb.transport.outcome import Raised, Returned, outcome_of

# Ended after a step that all ranks share, interrupted wherever they are, or killed on the spot.
Stop: TypeAlias = Literal["finish", "interrupt", "kill"]
_FORCE: tuple[Stop | None, ...] = (None, "finish", "interrupt", "kill")


@dataclass(slots=True)
class RunContext:
    """The context that a run's worker groups share: the state and record of its events, the notebook's lines, and the limits of time."""

    view: RunState
    record: RunRecorder
    sources: CellSources
    deadline: float | None
    stop_grace_period: float
    hang_warning_after: float = 0.0
    wake: Callable[[], None] = lambda: None
    on_event: Callable[[Event], None] = lambda _: None
    read_outcome: Callable[[int, int], Returned | Raised | Failure | None] = outcome_of
    fetched_logs: FetchedLogs = field(default_factory=FetchedLogs)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, event: Event) -> None:
        """Keep an event, from any thread."""
        with self._lock:
            self.view.apply(event)
            self.record.event(event)
        self.on_event(event)


def stronger(before: Stop | None, how: Stop) -> Stop:
    """Of two ways to end a run the one with more force."""
    return how if _FORCE.index(how) > _FORCE.index(before) else before or how
