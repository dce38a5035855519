"""The part of a run's state that its folder does not keep: bars that move, open lines, the load of devices."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from accelerate_nb.events.event_codec import to_line
from accelerate_nb.events.model import Event, LogLine
from accelerate_nb.events.run_state import RunState


def live_values(view: RunState) -> list[dict[str, Any]]:
    """The events that make up this state, ready to be sent."""
    return [json.loads(to_line(event)) for event in _live_events(view)]


def apply_live(view: RunState, values: Sequence[Mapping[str, Any]]) -> None:
    """Bring another view of the same run to this state."""
    events = [msgspec.convert(item, Event) for item in values]
    open_lines = [event for event in events if isinstance(event, LogLine)]
    for event in events:
        if not isinstance(event, LogLine):
            view.apply(event)
    view.replace_open_lines(open_lines)


def _live_events(view: RunState) -> Iterator[Event]:
    if view.host is not None:
        yield view.host
    yield from view.node_loads.values()
    for glance in view.glances():
        yield from glance.devices.values()
        yield from (bar for bar in glance.progress.values() if not bar.closed)
        yield from glance.open_lines
