"""Exceptions as they travel: made anew from what they hold, since their constructors may want other arguments."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from contextlib import suppress
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any

_OF_EVERY_EXCEPTION = frozenset(dir(BaseException))


def held(error: BaseException) -> dict[str, Any]:
    """What an exception holds beside its arguments: its attributes, and the fields of its class (`errno`, `code`, ...)."""
    return {**_fields(error), **vars(error)}


def remade(kind: type[BaseException], args: tuple[Any, ...], values: Mapping[str, Any]) -> BaseException:
    """A `kind` with these arguments and values; no constructor written in Python is called."""
    error: BaseException = _builtin(kind).__new__(kind, *args)
    for name, value in {"args": args, **values}.items():
        # an exception may be a frozen dataclass, which refuses plain assignment
        with suppress(AttributeError):
            object.__setattr__(error, name, value)
    return error


def reduced(error: BaseException) -> tuple[Any, ...] | None:
    """How pickle should take an exception apart, where its own way would call a constructor with the wrong arguments."""
    kind = type(error)
    in_python = (isinstance(way, FunctionType) for way in (kind.__reduce__, kind.__reduce_ex__))
    if not isinstance(kind.__init__, FunctionType) or any(in_python):
        return None
    return remade, (kind, error.args, held(error))


def _fields(error: BaseException) -> dict[str, Any]:
    names = {
        name
        for base in type(error).__mro__
        for name, value in vars(base).items()
        if isinstance(value, (GetSetDescriptorType, MemberDescriptorType)) and name not in _OF_EVERY_EXCEPTION
    }
    return {name: value for name in sorted(names) if (value := getattr(error, name, None)) is not None}


def _builtin(kind: type[BaseException]) -> type[BaseException]:
    """The class of Python's own that decides how an instance lies in memory: only its `__new__` may make one."""
    base: type[BaseException] | None = kind
    while base is not None and vars(builtins).get(base.__name__) is not base:
        base = base.__base__
    return base or BaseException
