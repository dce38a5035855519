"""Where code inside a worker puts its events, whoever is listening."""

from __future__ import annotations

from typing import Protocol

from accelerate_nb.events.model import Event
from accelerate_nb.own import Own


class Outlet(Protocol):
    """Something that takes events: a worker's `Sender`, or a list in a test."""

    rank: int

    def send(self, event: Event) -> None:
        """Pass the event on; never raises and never waits for a reader."""


class _Holder:
    """A rank's outlet."""

    outlet: Outlet | None = None


_holder = Own(_Holder)


def connect(outlet: Outlet | None) -> None:
    """From now on this rank's events go to `outlet`; `None` drops them."""
    _holder.get().outlet = outlet


def outlet() -> Outlet | None:
    """The rank's outlet, or `None` where nobody listens (a plain script)."""
    return _holder.get().outlet


def emit(event: Event) -> None:
    """Send an event to whoever listens; does nothing where nobody does."""
    if (listener := outlet()) is not None:
        listener.send(event)
