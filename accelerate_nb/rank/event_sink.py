"""The sink for events of code inside a worker, whoever is listening, and the numbers that the code gives to any library's log."""

import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from accelerate_nb.config.environment import autolog
from accelerate_nb.events.event_types import Event, Metric


class EventSink(Protocol):
    """Something that takes events: a worker's `Sender`, or a list in a test."""

    rank: int

    def send(self, event: Event) -> None:
        """Pass the event on; never raises and never waits for a reader."""


@dataclass(eq=False)
class _Outlet:
    """Where this rank's events go; how deep its calls of logs are nested, and the names that were logged so far."""

    sink: EventSink | None = None
    depth: int = 0
    names: set[str] = field(default_factory=set)


_outlet = _Outlet()


def connect(outlet: EventSink | None) -> None:
    """Send this rank's events to `outlet` from now on; `None` drops them."""
    _outlet.sink = outlet


def outlet() -> EventSink | None:
    """The rank's outlet, or `None` where nobody listens (a plain script)."""
    return _outlet.sink


def emit(event: Event) -> None:
    """Send an event to whoever listens; does nothing where nobody does."""
    if (listener := outlet()) is not None:
        listener.send(event)


def is_on() -> bool:
    """Whether metrics that nobody logged by `Accelerator.log` are shown: the setting `autolog`."""
    return autolog(os.environ)


@contextmanager
def log_call() -> Iterator[bool]:
    """A call of some library's log; yields whether it is the outermost, the only one whose numbers are reported."""
    _outlet.depth += 1
    try:
        yield _outlet.depth == 1
    finally:
        _outlet.depth -= 1


def report_logged(values: Mapping[str, Any], step: int | None, now: float | None = None) -> None:
    """Send the numbers among logged values as metrics of a moment, where somebody listens."""
    # a tensor on a device is waited for only where its value is shown
    if outlet() is not None:
        numbers = dict(numbers_of(values))
        _outlet.names.update(numbers)
        _send(numbers, step, now)


def report_shown(numbers: Mapping[str, float], step: int | None) -> None:
    """Send the numbers that stand beside a progress bar, but for those that are logged as well."""
    _send({name: value for name, value in numbers.items() if name not in _outlet.names}, step)


def _send(numbers: Mapping[str, float], step: int | None, now: float | None = None) -> None:
    if (listener := outlet()) is not None:
        now = time.time() if now is None else now
        for name, value in numbers.items():
            emit(Metric(listener.rank, name, value, step, now))


def numbers_of(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers among values, also tensors of one element; nested names are joined: `eval/loss`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from numbers_of(value, f"{prefix}{name}/")
        elif (found := number_of(value)) is not None:
            yield f"{prefix}{name}", found


def number_of(value: Any) -> float | None:
    """A value as a number; `None` for what is none."""
    if not isinstance(value, (int, float)):
        # tensors and arrays, without loading what defines them
        size = value.numel() if callable(getattr(value, "numel", None)) else getattr(value, "size", None)
        has_no_number = any(getattr(value, name, False) for name in ("is_meta", "is_nested"))
        if size != 1 or has_no_number or not hasattr(value, "item"):
            return None
        value = value.item()
    try:
        return float(value)
    except OverflowError:
        # Python's whole numbers have no end
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError):
        return None
