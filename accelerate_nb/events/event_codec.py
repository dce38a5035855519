"""Events as lines of JSON, and back."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, fields, replace
from typing import Any, cast

from accelerate_nb.events.field_checks import checked_fields
from accelerate_nb.events.knob_events import KnobHeld, KnobValue
from accelerate_nb.events.model import (
    DeviceSample,
    Display,
    Event,
    Failure,
    FirstStep,
    Frame,
    Hang,
    HostSample,
    IdleWarning,
    LogLine,
    MemoryUse,
    MeshCoordinates,
    Metric,
    NodeRanks,
    PrecisionChoice,
    Progress,
    Restart,
    StateChange,
    StepBreakdown,
    TaskDone,
)
from accelerate_nb.events.profile_events import ProfiledOperation, ProfileRequested, StepProfile
from accelerate_nb.events.terminal_lines import plain, plain_name

# The `type` tag of each event in `events.jsonl`. A tag stays what it is when a class is renamed.
TAGS: dict[str, type[Event]] = {
    "log": LogLine,
    "metric": Metric,
    "progress": Progress,
    "display": Display,
    "device_sample": DeviceSample,
    "host_sample": HostSample,
    "state_change": StateChange,
    "idle_warning": IdleWarning,
    "failure": Failure,
    "hang": Hang,
    "task_done": TaskDone,
    "first_step": FirstStep,
    "restart": Restart,
    "node_ranks": NodeRanks,
    "mesh_coordinates": MeshCoordinates,
    "precision_choice": PrecisionChoice,
    "step_breakdown": StepBreakdown,
    "memory_use": MemoryUse,
    "knob_value": KnobValue,
    "knob_held": KnobHeld,
    "profile_requested": ProfileRequested,
    "step_profile": StepProfile,
}
_TAG_OF = {event_class: tag for tag, event_class in TAGS.items()}
_FIELDS = {tag: frozenset(field.name for field in fields(event_class)) for tag, event_class in TAGS.items()}
# The fields that hold text; those of one line, in which something is named.
_TEXTS = {
    event_class: ()
    if event_class in {LogLine, Display}
    else tuple(field.name for field in fields(event_class) if re.search(r"str|Frame|Operation", str(field.type)))
    for event_class in TAGS.values()
}
_NAMES = frozenset({"name", "label", "unit", "bar", "note", "device", "operations"})
# Folders of runs before the tags name the class, under the key `event`.
_FORMER_TAGS = {
    "LogLine": "log",
    "Metric": "metric",
    "Progress": "progress",
    "Display": "display",
    "DeviceSample": "device_sample",
    "HostSample": "host_sample",
    "StateChange": "state_change",
    "Quiet": "idle_warning",
    "Failure": "failure",
    "Hang": "hang",
    "Answered": "task_done",
}


def to_line(event: Event) -> bytes:
    """An event as one line of JSON with its newline: the tag under `type`, then its fields."""
    values = asdict(event)
    if isinstance(event, Failure):
        values = {"exception": values.pop("type"), **values}
    return json.dumps({"type": _TAG_OF[type(event)], **values}, default=str).encode() + b"\n"


def from_line(line: bytes | str) -> Event:
    """The event that `to_line` wrote; `ValueError` names a tag that is not known here."""
    return from_values(json.loads(line))


def from_values(values: Any) -> Event:
    """The event of a decoded line, which is used up; `ValueError` names a tag that is not known here, or a field of another type."""
    if not isinstance(values, dict):
        raise ValueError(f"A line holds no event, but {type(values).__name__}.")  # noqa: TRY004 - one error for all that is none
    if "event" in values:
        former = values.pop("event")
        tag: Any = _FORMER_TAGS.get(str(former), former)
    else:
        tag = values.pop("type", None)
        if tag == "failure":
            values["type"] = values.pop("exception", "")
    if not isinstance(tag, str) or tag not in TAGS:
        raise ValueError(f"A line holds an event of type {tag!r}; known types are {', '.join(TAGS)}.")
    if not values.keys() <= _FIELDS[tag]:
        # of a newer version
        values = {key: value for key, value in values.items() if key in _FIELDS[tag]}
    return cast("Event", checked_fields(TAGS[tag], values))


def harmless(event: Event) -> Event:
    """The event with its texts as any terminal and any page may show them; lines and displays stay as they are."""
    changed = {
        name: found
        for name in _TEXTS[type(event)]
        if (found := harmless_value(value := getattr(event, name), is_name=name in _NAMES)) is not value
    }
    return replace(event, **changed) if changed else event


def harmless_value(value: Any, *, is_name: bool) -> Any:
    """A plain value with all of its texts as terminals and pages may show them; those of names are one line."""
    if isinstance(value, str):
        return value if value.isprintable() else plain_name(value) if is_name else plain(value)
    if isinstance(value, dict):
        return {plain_name(name): harmless_value(part, is_name=is_name) for name, part in value.items()}
    if isinstance(value, (tuple, list)) and value:
        parts = [harmless_value(part, is_name=is_name) for part in value]
        return type(value)(*parts) if isinstance(value, (Frame, ProfiledOperation)) else type(value)(parts)
    return value
