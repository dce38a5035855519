"""Events as lines of JSON, and back: in files, and in the stream from a worker to its node's agent."""

import json
import re
import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, get_args

import msgspec

from accelerate_nb.events.event_types import Display, Event, Frame, LogLine, ProfiledOperation
from accelerate_nb.events.terminal_lines import plain, plain_name

_ENCODER = msgspec.json.Encoder()
_DECODER: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
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
    try:
        line = _ENCODER.encode(event)
    except (TypeError, ValueError):
        # a value that JSON has nothing for, or text that is no UTF-8
        line = b"null"
    # a number that is infinite, or none, would be a null there
    if b"null" in line:
        values = dict(zip(event.__struct_encode_fields__, msgspec.structs.astuple(event), strict=True))
        line = json.dumps({"type": event.__struct_config__.tag, **values}, default=str).encode()
    return line + b"\n"


def from_line(line: bytes | str) -> Event:
    """The event that `to_line` wrote, in this version or an earlier one; raises `ValueError`, and `RecursionError` if nested deeply."""
    try:
        return _DECODER.decode(line)
    except ValueError:
        # with what only Python's JSON has, such as NaN, or of before the tags
        values = json.loads(line)
    if isinstance(values, dict) and "event" in values:
        former = str(values.pop("event"))
        if former == "Failure":
            values["exception"] = values.pop("type", "")
        values["type"] = _FORMER_TAGS.get(former, former)
    event: Event = msgspec.convert(values, Event)
    return event


class EventSender:
    """The worker's end of its stream: sends its events over a socket, from any thread, without waiting for another sender."""

    # That one sends both: so what is collected as garbage meanwhile may send (a progress bar closes then), and a process forked meanwhile.

    def __init__(self, sock: socket.socket, rank: int) -> None:
        self.rank = rank
        self._socket = sock
        self._lock = threading.Lock()
        self._due: deque[bytes] = deque()

    def send(self, event: Event) -> None:
        """Send one event; without a reader, it is dropped."""
        self._due.append(to_line(event))
        # another sender may have seen the end of the queue just before this event came: check again
        while self._due and not self._lock.locked():
            with self._lock:
                try:
                    while self._due:
                        self._socket.sendall(self._due.popleft())
                except OSError:
                    # the notebook's process has gone, and this one is about to be ended
                    self._due.clear()
                except BaseException:
                    # an interrupt may have cut the line off: the next event begins one
                    self._due.appendleft(b"\n")
                    raise


class EventReader:
    """The reader's end of one stream: gives whole events out of bytes as they come."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[Event]:
        """The events that are complete now; a line that is none, which the function may have written, is left out."""
        first, *others = data.split(b"\n")
        self._parts.append(first)
        for other in others:
            line, self._parts = b"".join(self._parts), [other]
            with suppress(ValueError, RecursionError):
                yield from_line(line)


# The fields that hold text; those of one line, in which something is named.
_TEXTS = {
    event_class: ()
    if event_class in {LogLine, Display}
    else tuple(name for name, hint in event_class.__annotations__.items() if re.search(r"str|Frame|Operation", hint))
    for event_class in get_args(Event)
}
_NAMES = frozenset({"name", "label", "unit", "bar", "note", "device", "operations"})


def harmless(event: Event) -> Event:
    """The event with its texts as any terminal and any page may show them; lines and displays stay as they are."""
    changed = {
        name: found
        for name in _TEXTS[type(event)]
        if (found := harmless_value(value := getattr(event, name), is_name=name in _NAMES)) is not value
    }
    return msgspec.structs.replace(event, **changed) if changed else event


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
