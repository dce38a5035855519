"""The arguments of a launch as text: a record that a person reads and compares, from which nothing is made again."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import islice
from reprlib import Repr
from typing import Any

_SECRET = re.compile(r"token|passw|secret|credential|api[-_]?key|(^|[-_])auth", re.IGNORECASE)
_HIDDEN = "(not kept)"
_MOST_CHARACTERS = 300
_MOST_BITS = 8192


class _Values(Repr):
    """The text of plain values; of anything else the type alone, since its text may be long, wake a device, or differ each time."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict = 4, 30
        self.maxtuple = self.maxlist = self.maxset = self.maxfrozenset = 30
        self.maxstring = self.maxother = self.maxlong = _MOST_CHARACTERS

    def repr_instance(self, x: Any, level: int) -> str:
        """The text of a value whose type has no rule of its own."""
        if isinstance(x, (float, complex, bool, Enum, os.PathLike)) or x is None:
            return super().repr_instance(x, level)
        name = x.__qualname__ if isinstance(x, type) or inspect.isroutine(x) else type(x).__qualname__
        return f"<{name}>"

    def repr_int(self, x: int, level: int) -> str:
        """An integer's text; of one with thousands of digits, which Python refuses to write, the type."""
        return super().repr_int(x, level) if x.bit_length() < _MOST_BITS else "<int>"

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """A dictionary's text, without the values of secrets; one of a million keys is neither copied nor sorted."""
        first = islice(x.items(), self.maxdict + 1)
        hidden = {key: _Hidden() if isinstance(key, str) and _SECRET.search(key) else value for key, value in first}
        return super().repr_dict(hidden, level)

    def repr_set(self, x: set[Any], level: int) -> str:
        """A set's text, which is not sorted either where it is long."""
        return super().repr_set(set(islice(x, self.maxset + 1)), level)

    def repr_frozenset(self, x: frozenset[Any], level: int) -> str:
        """A frozen set's text, in the same way."""
        return super().repr_frozenset(frozenset(islice(x, self.maxfrozenset + 1)), level)

    def repr__Hidden(self, x: _Hidden, level: int) -> str:  # noqa: N802 - reprlib's name for a type
        """What stands for a secret."""
        return _HIDDEN


class _Hidden:
    """Stands for the value of a secret."""


_VALUES = _Values()


def call_lines(function: Callable[..., Any], args: Sequence[Any]) -> str:
    r"""
    A call's arguments, `name = value` a line, defaults among them; values are bounded, and secrets left out.

    >>> call_lines(train, (0.1,))
    'lr = 0.1\nepochs = 3\n'
    """
    keywords: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        args, keywords = (*function.args, *args), {**function.keywords, **keywords}
        function = function.func
    return _as_lines((name, _VALUES.repr(value)) for name, value in _named(function, args, keywords))


def word_lines(words: Iterable[str]) -> str:
    r"""
    The arguments of a command line, `option = words` a line; the values of secrets are left out.

    >>> word_lines(["data", "--lr", "0.1", "--verbose"])
    'words = data\n--lr = 0.1\n--verbose = yes\n'
    """
    values: dict[str, list[str]] = {"words": []}
    name = "words"
    for word in words:
        if not word.startswith("-") or word == "-":
            values[name].append(word)
            continue
        name, _, joined = word.partition("=")
        values.setdefault(name, []).extend([joined] if joined else [])
    if not values["words"]:
        del values["words"]
    return _as_lines((name, " ".join(found) or "yes") for name, found in values.items())


def values_of(lines: str) -> dict[str, str]:
    """The texts of the values in such lines, by their names."""
    return {name: value for name, is_value, value in (line.partition(" = ") for line in lines.splitlines()) if is_value}


def _as_lines(values: Iterable[tuple[str, str]]) -> str:
    return "".join(f"{name} = {_HIDDEN if _SECRET.search(name) else _cut(text)}\n" for name, text in values)


def _named(function: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    try:
        bound = inspect.signature(function).bind(*args, **keywords)
    except (TypeError, ValueError):
        # the call is about to fail by itself, or has no signature
        yield from ((f"args[{index}]", value) for index, value in enumerate(args))
        yield from keywords.items()
        return
    bound.apply_defaults()
    kinds = {name: parameter.kind for name, parameter in bound.signature.parameters.items()}
    for name, value in bound.arguments.items():
        if kinds[name] is inspect.Parameter.VAR_KEYWORD:
            yield from value.items()
        elif kinds[name] is not inspect.Parameter.VAR_POSITIONAL or value:
            yield name, value


def _cut(text: str) -> str:
    text = text.replace("\n", " ")
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"
