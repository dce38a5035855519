"""Events as lines of JSON, and back."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

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


def from_values(values: dict[str, Any]) -> Event:
    """The event of a decoded line, which is used up; `ValueError` names a tag that is not known here."""
    if "event" in values:
        tag = _FORMER_TAGS.get(former := values.pop("event"), former)
    else:
        tag = values.pop("type", None)
        if tag == "failure":
            values["type"] = values.pop("exception", "")
    if tag not in TAGS:
        raise ValueError(f"A line holds an event of type {tag!r}; known types are {', '.join(TAGS)}.")
    if tag in {"log", "metric"} and values.keys() == _FIELDS[tag]:
        # there are a million of them in a long run
        return TAGS[tag](**values)
    known: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in values.items() if key in _FIELDS[tag]
    }
    if "frames" in known:
        known["frames"] = tuple(Frame(*frame) for frame in known["frames"])
    if "operations" in known:
        known["operations"] = tuple(ProfiledOperation(*operation) for operation in known["operations"])
    return TAGS[tag](**known)
