"""The sink for events of code inside a worker, whoever is listening."""

from __future__ import annotations

from typing import Protocol

from accelerate_nb.events.model import Event
from accelerate_nb.rank_local import RankLocal


class EventSink(Protocol):
    """Something that takes events: a worker's `Sender`, or a list in a test."""

    rank: int

    def send(self, event: Event) -> None:
        """Pass the event on; never raises and never waits for a reader."""


class _SinkHolder:
    """A rank's outlet."""

    outlet: EventSink | None = None


_holder = RankLocal(_SinkHolder)


def connect(outlet: EventSink | None) -> None:
    """Send this rank's events to `outlet` from now on; `None` drops them."""
    _holder.get().outlet = outlet


def outlet() -> EventSink | None:
    """The rank's outlet, or `None` where nobody listens (a plain script)."""
    return _holder.get().outlet


def emit(event: Event) -> None:
    """Send an event to whoever listens; does nothing where nobody does."""
    if (listener := outlet()) is not None:
        listener.send(event)
