"""The part of a run's state that its folder does not keep: bars that move, open lines, the load of devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from accelerate_nb.events.model import Event, LogLine
from accelerate_nb.events.run_state import RunState


def live_events(view: RunState) -> Iterator[Event]:
    """The events that make up this part of a state."""
    if view.host is not None:
        yield view.host
    yield from view.node_loads.values()
    for glance in view.glances():
        yield from glance.devices.values()
        yield from (bar for bar in glance.progress.values() if not bar.closed)
        yield from glance.open_lines


def apply_live(view: RunState, events: Sequence[Event]) -> None:
    """Bring another view of the same run to this state."""
    for event in events:
        if not isinstance(event, LogLine):
            view.apply(event)
    view.replace_open_lines([event for event in events if isinstance(event, LogLine)])
