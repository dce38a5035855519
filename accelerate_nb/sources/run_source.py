"""The source that a run was launched with, as plain text in the run's folder."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from accelerate_nb.sources.call_arguments import call_lines, values_of
from accelerate_nb.sources.cells import CellSources

FILE_NAME = "source.txt"
ARGUMENTS = "arguments"
# The most that is kept of a run's source, in bytes.
SIZE_LIMIT = 64 << 10
_MOST_ARGUMENTS = 100
_HEAD = re.compile(rf"^# -{{8}} ({ARGUMENTS}|function|launch|script): ?(.*)\n", re.MULTILINE)
_CUT = "\n# … the rest was not kept\n"


@dataclass(frozen=True, slots=True)
class SourcePart:
    """
    One text of a run's source: `role` is "function" (the cell or file that defines it), "launch" (the cell that launched it), "script",
    or "arguments" (what the function or the script was given).

    `origin` is the shown name of the cell or the path of the file; of arguments, the name of what was given them.
    """

    role: str
    origin: str
    text: str


@runtime_checkable
class HasSource(Protocol):
    """A callable that knows the text which it runs."""

    def source_parts(self) -> tuple[SourcePart, ...]:
        """The text that it runs, and its arguments, as far as there are any."""


def keep_source(
    folder: Path, function: Callable[..., Any], args: Sequence[Any], sources: CellSources
) -> dict[str, str]:
    """
    Write the source of a run that is launched now into its folder; a run is worth more than this record.

    Returns the first arguments of the function or script, as texts.
    """
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
    if isinstance(function, HasSource):
        return function.source_parts()
    parts = arguments_part(_inner(function), call_lines(function, args))
    defined = _definition(function, sources)
    launching = _newest_cell(sources)
    parts += () if defined is None else (defined,)
    if launching is not None and (defined is None or launching.origin != defined.origin):
        parts += (launching,)
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
    r"""
    The parts of such a text.

    >>> parts_of("# -------- launch: Cell In[3]\nlaunch(train)\n")
    (SourcePart(role='launch', origin='Cell In[3]', text='launch(train)\n'),)
    """
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


def _newest_cell(sources: CellSources) -> SourcePart | None:
    numbers: Mapping[str, int] = sources.numbers
    return _cell(sources, max(numbers, key=lambda name: numbers[name]), "launch") if numbers else None


def _cell(sources: CellSources, filename: str, role: str) -> SourcePart:
    return SourcePart(role, sources.name(filename), "".join(sources.lines[filename]))
