"""Checks of plain values against the fields of frozen dataclasses: what arrives from elsewhere is of the type that is declared."""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields
from functools import cache, partial
from typing import Any, Literal, TypeAlias, Union, cast, get_args, get_origin, get_type_hints


class MismatchError(ValueError):
    """A value is not of its field's type."""


# Bytes of a large machine, or seconds since 1970 with room.
LARGEST = 10**15
_DEEPEST = 50

_Check: TypeAlias = Callable[[Any], Any]
# The checks of what has a form of its own, by its type; the codec of messages adds to it.
SPECIAL_CHECKS: dict[Any, _Check] = {}


def checked_fields(value_class: type[Any], values: Any) -> Any:
    """A frozen dataclass out of its fields, none of which is missing, unknown or of another type."""
    if not isinstance(values, dict):
        raise MismatchError(f"{value_class.__name__} is no object, but {type(values).__name__}")
    checks, required = _field_checks(cast("Hashable", value_class))
    if values.keys() != checks.keys():
        if unknown := values.keys() - checks.keys():
            raise MismatchError(f"it has unknown fields: {', '.join(sorted(unknown))[:200]}")
        if missing := required - values.keys():
            raise MismatchError(f"it lacks {', '.join(sorted(missing))}")
    checked, name = dict(values), ""
    try:
        for name, value in values.items():
            # most are plain and right, and there are many of them
            plain, check = checks[name]
            if type(value) is not plain:
                checked[name] = check(value)
    except MismatchError as error:
        raise MismatchError(f"{name}: {error}") from None
    return value_class(**checked)


def fitting(value_class: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the values that fit the fields of a class, or are named by none of them."""
    checks, _ = _field_checks(cast("Hashable", value_class))
    return {name: value for name, value in values.items() if name not in checks or _fits(checks[name][1], value)}


def _fits(check: _Check, value: Any) -> bool:
    try:
        check(value)
    except MismatchError:
        return False
    return True


def is_drawable(value: Any, depth: int = 0) -> bool:
    """Whether all numbers of a plain value are finite and of a size that means something, and none is nested deeply."""
    if isinstance(value, (list, tuple, dict)):
        parts = value.values() if isinstance(value, dict) else value
        return depth < _DEEPEST and all(is_drawable(part, depth + 1) for part in parts)
    return not isinstance(value, (int, float)) or abs(value) <= LARGEST


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
    if (special := SPECIAL_CHECKS.get(hint)) is not None:
        return special
    if origin in {Union, types.UnionType}:
        return partial(_check_union, [_check_of(argument) for argument in arguments])
    if origin is Literal:
        return partial(_check_literal, arguments)
    if origin is tuple:
        size = None if arguments[-1] is Ellipsis else len(arguments)
        return partial(_check_items, _check_of(arguments[0]), size)
    if origin is not None:  # a mapping by name
        return partial(_check_mapping, _check_of(arguments[1]))
    if hasattr(hint, "__dataclass_fields__"):
        return partial(checked_fields, hint)
    if hasattr(hint, "_fields"):
        return partial(_check_named_tuple, hint)
    return partial(check_plain, hint)


def check_plain(wanted: type, value: Any) -> Any:
    """The value, which is of this type."""
    # a truth value is an int to Python, and an int is written where a float is meant
    if type(value) is wanted or (wanted is float and type(value) is int):
        return value
    raise MismatchError(f"{wanted.__name__} was expected, not {type(value).__name__}")


def _check_union(checks: list[_Check], value: Any) -> Any:
    *others, last = checks
    for check in others:
        with suppress(MismatchError):
            return check(value)
    return last(value)


def _check_literal(choices: tuple[Any, ...], value: Any) -> Any:
    if isinstance(value, (str, int)) and value in choices:
        return value
    raise MismatchError(f"one of {', '.join(map(repr, choices))} was expected, not {str(value)[:80]!r}")


def _check_items(check: _Check, size: int | None, value: Any) -> tuple[Any, ...]:
    items = check_plain(list, value)
    if size is not None and len(items) != size:
        raise MismatchError(f"{size} items were expected, not {len(items)}")
    return tuple(map(check, items))


def _check_mapping(check: _Check, value: Any) -> dict[str, Any]:
    return {name: check(item) for name, item in check_plain(dict, value).items()}


def _check_named_tuple(tuple_class: Any, value: Any) -> Any:
    checks = [_check_of(hint) for hint in get_type_hints(tuple_class).values()]
    items = check_plain(list, value)
    if len(items) != len(checks):
        raise MismatchError(f"{len(checks)} items were expected, not {len(items)}")
    return tuple_class(*(check(item) for check, item in zip(checks, items, strict=True)))
