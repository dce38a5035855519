"""The sink for events of code inside a worker, whoever is listening."""

from __future__ import annotations

from typing import Protocol

from accelerate_nb.events.model import Event


class EventSink(Protocol):
    """Something that takes events: a worker's `Sender`, or a list in a test."""

    rank: int

    def send(self, event: Event) -> None:
        """Pass the event on; never raises and never waits for a reader."""


class _Outlet:
    """Where this process's events go."""

    sink: EventSink | None = None


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
