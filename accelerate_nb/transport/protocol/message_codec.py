"""The codec of messages: each one line of JSON with a tag, whose fields are checked when it arrives."""

from __future__ import annotations

import base64
import json
import types
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields
from functools import cache, partial
from operator import attrgetter
from typing import Any, Literal, TypeAlias, Union, cast, get_args, get_origin, get_type_hints

from accelerate_nb.errors import ProtocolError
from accelerate_nb.events.event_codec import from_values, to_line
from accelerate_nb.events.model import Event, LogLine
from accelerate_nb.transport.protocol.message import Message
from accelerate_nb.transport.protocol.messages import TAGS

_EVENT_CLASSES = get_args(Event)
_LOG_LINE_VALUES = attrgetter(*(field.name for field in fields(LogLine)))
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
        return cast("Message", _checked_fields(message_class, values))
    except _MismatchError as error:
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


class _MismatchError(Exception):
    """A value is not of its field's type."""


_Check: TypeAlias = Callable[[Any], Any]


def _checked_fields(value_class: type[Any], values: Any) -> Any:
    """A frozen dataclass out of its fields, none of which is missing, unknown or of another type."""
    if not isinstance(values, dict):
        raise _MismatchError(f"{value_class.__name__} is no object, but {type(values).__name__}")
    checks, required = _field_checks(cast("Hashable", value_class))
    if values.keys() != checks.keys():
        if unknown := values.keys() - checks.keys():
            raise _MismatchError(f"it has unknown fields: {', '.join(sorted(unknown))[:200]}")
        if missing := required - values.keys():
            raise _MismatchError(f"it lacks {', '.join(sorted(missing))}")
    checked, name = dict(values), ""
    try:
        for name, value in values.items():
            # most are plain and right, and there are many of them
            plain, check = checks[name]
            if type(value) is not plain:
                checked[name] = check(value)
    except _MismatchError as error:
        raise _MismatchError(f"{name}: {error}") from None
    return value_class(**checked)


@cache
def _field_checks(value_class: Any) -> tuple[dict[str, tuple[Any, _Check]], frozenset[str]]:
    """The type of each field where it needs no other check, its check by its annotation, and the fields that have no default."""
    hints = get_type_hints(value_class)
    own = fields(value_class)
    required = (field.name for field in own if field.default is MISSING and field.default_factory is MISSING)
    checks = {field.name: (_plain_type(hints[field.name]), _check_of(hints[field.name])) for field in own}
    return checks, frozenset(required)


def _plain_type(hint: Any) -> Any:
    return hint if hint in {int, float, str, bool} else None


def _check_of(hint: Any) -> _Check:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: value
    if (special := _SPECIAL_CHECKS.get(hint)) is not None:
        return special
    if origin in {Union, types.UnionType}:
        return partial(_check_union, [_check_of(argument) for argument in arguments])
    if origin is Literal:
        return partial(_check_literal, arguments)
    if origin is tuple:
        return partial(_check_items, _check_of(arguments[0]))
    if origin is not None:  # a mapping by name
        return partial(_check_mapping, _check_of(arguments[1]))
    if hasattr(hint, "__dataclass_fields__"):
        return partial(_checked_fields, hint)
    if hasattr(hint, "_fields"):
        return partial(_check_named_tuple, hint)
    return partial(_check_plain, hint)


def _check_plain(wanted: type, value: Any) -> Any:
    # a truth value is an int to Python, and an int is written where a float is meant
    if type(value) is wanted or (wanted is float and type(value) is int):
        return value
    raise _MismatchError(f"{wanted.__name__} was expected, not {type(value).__name__}")


def _check_union(checks: list[_Check], value: Any) -> Any:
    *others, last = checks
    for check in others:
        with suppress(_MismatchError):
            return check(value)
    return last(value)


def _check_literal(choices: tuple[Any, ...], value: Any) -> Any:
    if isinstance(value, (str, int)) and value in choices:
        return value
    raise _MismatchError(f"one of {', '.join(map(repr, choices))} was expected, not {str(value)[:80]!r}")


def _check_event(value: Any) -> Event:
    if type(value) is list:
        return _check_log_line(value)
    try:
        return from_values(dict(_check_plain(dict, value)))
    except (ValueError, TypeError, KeyError) as error:
        raise _MismatchError(f"it is no event: {error}") from None


def _check_log_line(value: Any) -> LogLine:
    try:
        return LogLine(*_check_plain(list, value))
    except TypeError as error:
        raise _MismatchError(f"it is no line of a log: {error}") from None


def _check_message(value: Any) -> Message:
    try:
        return _message(value)
    except ProtocolError as error:
        raise _MismatchError(str(error)) from None


def _check_bytes(value: Any) -> bytes:
    try:
        return base64.b64decode(_check_plain(str, value), validate=True)
    except ValueError as error:
        raise _MismatchError(f"it is no base64: {error}") from None


# The checks of what has a form of its own between processes.
_SPECIAL_CHECKS: Mapping[Any, _Check] = {
    Event: _check_event,
    LogLine: _check_log_line,
    Message: _check_message,
    bytes: _check_bytes,
}


def _check_items(check: _Check, value: Any) -> tuple[Any, ...]:
    return tuple(map(check, _check_plain(list, value)))


def _check_mapping(check: _Check, value: Any) -> dict[str, Any]:
    return {name: check(item) for name, item in _check_plain(dict, value).items()}


def _check_named_tuple(tuple_class: Any, value: Any) -> Any:
    checks = [_check_of(hint) for hint in get_type_hints(tuple_class).values()]
    items = _check_plain(list, value)
    if len(items) != len(checks):
        raise _MismatchError(f"{len(checks)} items were expected, not {len(items)}")
    return tuple_class(*(check(item) for check, item in zip(checks, items, strict=True)))
