"""Exceptions as they travel: made anew from what they hold, since their constructors may want other arguments."""

import builtins
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any, NoReturn

# A loop that tries again and again makes each failure the context of the next.
MOST_LINKS = 100
_OF_EVERY_EXCEPTION = frozenset(dir(BaseException))


def linked_exceptions(error: BaseException) -> list[BaseException]:
    """The exception and those that led to it, nearest first."""
    found = {id(error): error}
    waiting = deque([error])
    while waiting and len(found) < MOST_LINKS:
        link = waiting.popleft()
        for inner in (link.__cause__, link.__context__, *getattr(link, "exceptions", ())):
            if isinstance(inner, BaseException) and id(inner) not in found and len(found) < MOST_LINKS:
                found[id(inner)] = inner
                waiting.append(inner)
    return list(found.values())


def exception_values(error: BaseException) -> dict[str, Any]:
    """The values of an exception beside its arguments: its attributes, and the fields of its class (`errno`, `code`, ...)."""
    names = {
        name
        for base in type(error).__mro__
        for name, value in vars(base).items()
        if isinstance(value, (GetSetDescriptorType, MemberDescriptorType)) and name not in _OF_EVERY_EXCEPTION
    }
    fields = {name: value for name in sorted(names) if (value := getattr(error, name, None)) is not None}
    return {**fields, **vars(error)}


def rebuilt_exception(kind: type[BaseException], args: tuple[Any, ...], values: Mapping[str, Any]) -> BaseException:
    """A `kind` with these arguments and values; no constructor written in Python is called."""
    # the class of Python's own that decides how an instance lies in memory: only its `__new__` may make one
    builtin: type[BaseException] | None = kind
    while builtin is not None and vars(builtins).get(builtin.__name__) is not builtin:
        builtin = builtin.__base__
    error: BaseException = (builtin or BaseException).__new__(kind, *args)
    for name, value in {"args": args, **values}.items():
        # an exception may be a frozen dataclass, which refuses plain assignment
        with suppress(AttributeError):
            object.__setattr__(error, name, value)
    return error


def exception_reduction(error: BaseException) -> tuple[Any, ...] | None:
    """The reduction of an exception for pickle, where pickle's own would call a constructor with the wrong arguments."""
    kind = type(error)
    in_python = (isinstance(way, FunctionType) for way in (kind.__reduce__, kind.__reduce_ex__))
    if not isinstance(kind.__init__, FunctionType) or any(in_python):
        return None
    return rebuilt_exception, (kind, error.args, exception_values(error))


def raise_as_it_is(error: BaseException) -> NoReturn:
    """Raise an exception that has happened elsewhere; where another one is being handled, that does not take its context's place."""
    context = error.__context__
    try:
        raise error
    finally:
        if context is not None:
            # it may be a frozen dataclass, which refuses plain assignment
            object.__setattr__(error, "__context__", context)


def message_of(error: BaseException) -> str:
    """The message of an exception."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a person's __str__ may raise anything
        return f"(its message can't be shown: {type(error).__qualname__}.__str__ fails)"
