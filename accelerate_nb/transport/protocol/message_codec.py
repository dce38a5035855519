"""The codec of messages: each one line of JSON with a tag, whose fields are checked when it arrives."""

from __future__ import annotations

import base64
import json
from dataclasses import fields
from operator import attrgetter
from typing import Any, cast, get_args

import msgspec

from accelerate_nb.errors import ProtocolError
from accelerate_nb.events.event_codec import to_line
from accelerate_nb.events.field_checks import SPECIAL_CHECKS, MismatchError, check_plain, checked_fields
from accelerate_nb.events.model import Event, LogLine
from accelerate_nb.transport.protocol.message import Message
from accelerate_nb.transport.protocol.messages import TAGS

_EVENT_CLASSES = get_args(Event)
_LOG_LINE_VALUES = attrgetter(*LogLine.__struct_fields__)
_TAG_OF = {message_class: tag for tag, message_class in TAGS.items()}


def encode(message: Message) -> bytes:
    """A message as one line of ASCII: its tag under `type`, then its fields."""
    return json.dumps(_plain(message)).encode("ascii")


def decode(body: bytes) -> Message:
    """The message that `encode` wrote; raises `ProtocolError` for anything else."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("malformed", f"a message is no JSON: {error}") from None
    return _message(values)


def _message(values: Any) -> Message:
    """The message of these plain values; raises `ProtocolError` where they are none."""
    if not isinstance(values, dict):
        raise ProtocolError("malformed", f"a message is no object, but {type(values).__name__}")
    tag = values.pop("type", None)
    message_class = TAGS.get(tag) if isinstance(tag, str) else None
    if message_class is None:
        raise ProtocolError("unknown", f"a message is of type {str(tag)[:80]!r}; known types are {', '.join(TAGS)}")
    try:
        return cast("Message", checked_fields(message_class, values))
    except MismatchError as error:
        raise ProtocolError("malformed", f"a message of type {tag!r} was refused: {error}") from None


# ------------------------------------------------------------------------------------------------------ plain and back


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, LogLine):
        # the event that comes most
        return _LOG_LINE_VALUES(value)
    if isinstance(value, _EVENT_CLASSES):
        return json.loads(to_line(value))
    if isinstance(value, Message):
        return {"type": _TAG_OF[type(value)], **_plain_fields(value)}
    return _plain_fields(value) if hasattr(value, "__dataclass_fields__") else value


def _plain_fields(value: Any) -> dict[str, Any]:
    return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}


def _check_event(value: Any) -> Event:
    if type(value) is list:
        return _check_log_line(value)
    try:
        event: Event = msgspec.convert(check_plain(dict, value), Event)
    except (ValueError, TypeError, KeyError) as error:
        raise MismatchError(f"it is no event: {error}") from None
    return event


def _check_log_line(value: Any) -> LogLine:
    try:
        return LogLine(*check_plain(list, value))
    except TypeError as error:
        raise MismatchError(f"it is no line of a log: {error}") from None


def _check_message(value: Any) -> Message:
    try:
        return _message(value)
    except ProtocolError as error:
        raise MismatchError(str(error)) from None


def _check_bytes(value: Any) -> bytes:
    try:
        return base64.b64decode(check_plain(str, value), validate=True)
    except ValueError as error:
        raise MismatchError(f"it is no base64: {error}") from None


# The checks of what has a form of its own between processes.
SPECIAL_CHECKS.update(
    {
        Event: _check_event,
        LogLine: _check_log_line,
        Message: _check_message,
        bytes: _check_bytes,
    }
)
