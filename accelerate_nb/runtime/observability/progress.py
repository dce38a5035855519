"""Progress bars for several processes: one process of each machine draws it, or none does and the notebook shows it."""

import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tqdm import auto

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.events.event_types import Progress
from accelerate_nb.rank.event_sink import emit, outlet
from accelerate_nb.runtime.world.state import PartialState

T = TypeVar("T")

_BETWEEN = 0.1


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """`tqdm.auto.tqdm`, shown by the first process of each machine only, unless `main_process_only=False`."""
    if args and isinstance(args[0], bool):
        raise ConfigurationError(
            f"tqdm({args[0]}, ...) was called, but the first argument is what to go through. "
            f"Write main_process_only={args[0]} instead."
        )
    hidden = kwargs.pop("disable", False) or (main_process_only and not PartialState().is_local_main_process)
    bar: Any = auto.tqdm  # a person's own arguments pass through
    return bar(*args, disable=hidden, **kwargs)


@dataclass(slots=True)
class ProgressReporter:
    """A process's progress in something, as the notebook shows it under its rank; nothing is written anywhere."""

    bar: str  # its name among those of the rank: the next one of that name replaces it
    label: str
    total: int | None
    done: int = 0
    unit: str = "batch"
    _first: int = field(init=False)
    _began: float = field(init=False)
    _reported_at: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._first, self._began = self.done, time.monotonic()

    def through(self, items: Generator[T, None, None]) -> Generator[T, None, None]:
        """All of the items; each is done when the next one is read."""
        self._report(closed=False)
        try:
            with closing(items):
                for item in items:
                    yield item
                    self.done += 1
                    if time.monotonic() - self._reported_at >= _BETWEEN:
                        self._report(closed=False)
        finally:
            self._report(closed=True)

    def _report(self, *, closed: bool) -> None:
        listener, now = outlet(), time.monotonic()
        if listener is None:
            return
        self._reported_at, passed = now, now - self._began
        rate = (self.done - self._first) / passed if passed > 0 and self.done > self._first else None
        emit(
            Progress(
                listener.rank, self.label, self.done, self.total, time.time(), rate, self.unit, closed, bar=self.bar
            )
        )
