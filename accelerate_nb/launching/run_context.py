"""The context of a run, which its worker groups share, the ways to stop it, and what it needs of a group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from accelerate_nb.events.model import Event
from accelerate_nb.events.run_folder import RunRecorder
from accelerate_nb.events.run_state import RunState
from accelerate_nb.failures.hang_report import StackSnapshot
from accelerate_nb.failures.rank_result import RankResult
from accelerate_nb.sources.cells import CellSources
from accelerate_nb.transport.messages import RankMessage
from accelerate_nb.transport.outcome import read_result

# Ended after a step that all ranks share, interrupted wherever they are, or killed on the spot.
Stop: TypeAlias = Literal["finish", "interrupt", "kill"]
_FORCE: tuple[Stop | None, ...] = (None, "finish", "interrupt", "kill")


class Outcomes:
    """The outcomes of a run, read into this process; those of a detached run are kept in its folder (`SavedOutcomes`)."""

    def read(self, _rank: int, descriptor: int) -> RankResult | None:
        """A rank's result, from the file in which its worker left it."""
        return read_result(descriptor)

    def save(self, _error: BaseException | None) -> bool:
        """Keep what ended the run for other processes; whether that was possible."""
        return True

    def facts(self) -> dict[str, Any]:
        """The facts that the run's status has for other processes."""
        return {}


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
    # of a session: the ranks that have returned from its tasks, and the end of those that wait for them; whether there are such
    returned_from_task: Callable[[], Collection[int]] = tuple
    end_task: Callable[[StackSnapshot], bool] = lambda _: False
    outcomes: Outcomes = field(default_factory=Outcomes)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, event: Event) -> None:
        """Keep an event, from any thread."""
        with self._lock:
            self.view.apply(event)
            self.record.event(event)
        self.on_event(event)


class WorkerGroupLike(Protocol):
    """One group of workers; a run has another after a restart."""

    timed_out: StackSnapshot | None

    @property
    def lost(self) -> str | None:
        """The reason why workers can't be observed any more."""

    @property
    def lost_ranks(self) -> Collection[int]:
        """The ranks of nodes that were lost."""

    @property
    def began(self) -> bool:
        """Whether the function has begun on some rank."""

    @property
    def stopped_at(self) -> str | None:
        """The point at which ranks stopped on request."""

    def follow(self) -> tuple[RankResult, ...]:
        """Run to the end."""

    def stop(self, how: Stop) -> None:
        """Request the end, from any thread."""

    def send(self, rank: int, message: RankMessage, descriptors: Sequence[int] = ()) -> None:
        """Send a message to a worker's inbox, where the worker is there."""

    def task_reply(self, rank: int, task: int) -> int:
        """The file of a rank's reply to a session's task, which has ended; it is the caller's to close."""

    def restart_watchdog(self, timeout: float) -> None:
        """Restart the idle watchdog, which warns after so many seconds."""

    def snapshot(self) -> StackSnapshot:
        """The stacks and collectives of every rank now."""


def stronger(before: Stop | None, how: Stop) -> Stop:
    """Of two ways to end a run the one with more force."""
    return how if _FORCE.index(how) > _FORCE.index(before) else before or how
