"""The source that a run was launched with, and its arguments, as plain text in the run's folder, to be read and compared."""

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from pathlib import Path
from reprlib import Repr
from typing import Any

from accelerate_nb.sources.cells import CellSources

_SECRET = re.compile(r"token|passw|secret|credential|api[-_]?key|(^|[-_])auth", re.IGNORECASE)
_HIDDEN = "(not kept)"
_SECRET_VALUE = object()
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
        if x is _SECRET_VALUE:
            return _HIDDEN
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
        hidden = {key: _SECRET_VALUE if isinstance(key, str) and _SECRET.search(key) else value for key, value in first}
        return super().repr_dict(hidden, level)

    def repr_set(self, x: set[Any], level: int) -> str:
        """A set's text, which is not sorted either where it is long."""
        return super().repr_set(set(islice(x, self.maxset + 1)), level)

    def repr_frozenset(self, x: frozenset[Any], level: int) -> str:
        """A frozen set's text, in the same way."""
        return super().repr_frozenset(frozenset(islice(x, self.maxfrozenset + 1)), level)


_VALUES = _Values()


def call_lines(function: Callable[..., Any], args: Sequence[Any]) -> str:
    """A call's arguments, `name = value` a line, defaults among them; values are bounded, and secrets left out."""
    keywords: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        args, keywords = (*function.args, *args), {**function.keywords, **keywords}
        function = function.func
    return _as_lines((name, _VALUES.repr(value)) for name, value in _named(function, args, keywords))


def word_lines(words: Iterable[str]) -> str:
    """The arguments of a command line, `option = words` a line; the values of secrets are left out."""
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
    lines = []
    for name, value in values:
        text = _HIDDEN if _SECRET.search(name) else value.replace("\n", " ")
        lines.append(f"{name} = {text if len(text) <= _MOST_CHARACTERS else f'{text[: _MOST_CHARACTERS - 1]}…'}\n")
    return "".join(lines)


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


FILE_NAME = "source.txt"
ARGUMENTS = "arguments"
# The most that is kept of a run's source, in bytes.
SIZE_LIMIT = 64 << 10
_MOST_ARGUMENTS = 100
_HEAD = re.compile(rf"^# -{{8}} ({ARGUMENTS}|function|launch|script): ?(.*)\n", re.MULTILINE)
_CUT = "\n# … the rest was not kept\n"


@dataclass(frozen=True, slots=True)
class SourcePart:
    """One text of a run's source, and the shown name of the cell, the path of the file, or what was given the arguments."""

    # "function" (the cell or file that defines it), "launch" (the cell that launched it), "script", or "arguments"
    role: str
    origin: str
    text: str


def keep_source(
    folder: Path, function: Callable[..., Any], args: Sequence[Any], sources: CellSources
) -> dict[str, str]:
    """Write the source of a launched run into its folder, if possible; returns the function's or script's first arguments."""
    parts = source_parts(function, args, sources)
    if text := as_text(parts):
        with suppress(OSError):
            (folder / FILE_NAME).write_text(text, encoding="utf-8", errors="backslashreplace")
    lines = next((part.text for part in parts if part.role == ARGUMENTS), "")
    return dict(islice(values_of(lines).items(), _MOST_ARGUMENTS))


def kept_source(folder: Path) -> tuple[SourcePart, ...]:
    """The source that a run's folder keeps; nothing where it keeps none."""
    try:
        return parts_of((folder / FILE_NAME).read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ()


def source_parts(function: Callable[..., Any], args: Sequence[Any], sources: CellSources) -> tuple[SourcePart, ...]:
    """The arguments of a function, the cell or file that defines it, and the newest cell, which launches it; of a program, its own text."""
    # of its class: an object that answers to every name has no text of its own
    if hasattr(type(function), "source_parts"):
        own_parts: tuple[SourcePart, ...] = function.source_parts()  # type: ignore[attr-defined]  # as asked for above
        return own_parts
    parts = arguments_part(_inner(function), call_lines(function, args))
    defined, numbers = _definition(function, sources), sources.numbers
    if defined is not None:
        parts += (defined,)
    if numbers:
        launching = _cell(sources, max(numbers, key=lambda name: numbers[name]), "launch")
        parts += (launching,) if defined is None or launching.origin != defined.origin else ()
    return parts


def arguments_part(called: Any, lines: str) -> tuple[SourcePart, ...]:
    """The arguments that something was called with, where there are any."""
    name = getattr(called, "__name__", type(called).__name__)
    return (SourcePart(ARGUMENTS, f"arguments of {name}", lines),) if lines else ()


def script_part(path: str, shown_path: str) -> SourcePart | None:
    """A script, as far as its text is kept; `None` where it can't be read as text."""
    try:
        with open(path, encoding="utf-8") as file:
            return SourcePart("script", shown_path, file.read(SIZE_LIMIT + 1))
    except (OSError, ValueError):
        return None


def as_text(parts: tuple[SourcePart, ...]) -> str:
    """Parts as one text of at most `SIZE_LIMIT` bytes, each below a line with its role and origin."""
    text = "".join(f"# -------- {part.role}: {part.origin}\n{part.text.rstrip()}\n" for part in parts)
    encoded = text.encode(errors="backslashreplace")
    if len(encoded) <= SIZE_LIMIT:
        return text
    return encoded[: SIZE_LIMIT - len(_CUT.encode())].decode(errors="ignore") + _CUT


def parts_of(text: str) -> tuple[SourcePart, ...]:
    """The parts of such a text."""
    _, *fields = _HEAD.split(text)
    return tuple(SourcePart(*fields[i : i + 3]) for i in range(0, len(fields), 3))


def _inner(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _definition(function: Callable[..., Any], sources: CellSources) -> SourcePart | None:
    inner = inspect.unwrap(_inner(function))
    # an object that is called has the code of its class
    code = getattr(inner if inspect.isroutine(inner) else type(inner).__call__, "__code__", None)
    if code is None:
        return None
    if code.co_filename in sources.lines:
        return _cell(sources, code.co_filename, "function")
    try:
        if getattr(inner, "__module__", None) == "__main__" and Path(code.co_filename).is_file():
            return script_part(code.co_filename, code.co_filename)
        # of a module, the function alone: the file may be long
        return SourcePart("function", code.co_filename, inspect.getsource(inner if inspect.isroutine(inner) else code))
    except (OSError, TypeError):
        return None


def _cell(sources: CellSources, filename: str, role: str) -> SourcePart:
    return SourcePart(role, sources.name(filename), "".join(sources.lines[filename]))
