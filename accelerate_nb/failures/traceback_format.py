"""A worker's exception as text and as frames: the person's own lines shown, the rest folded."""

import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from traceback import FrameSummary, TracebackException
from typing import TypeVar

from accelerate_nb.events.event_types import Frame
from accelerate_nb.sources.cells import CellSources
from accelerate_nb.sources.installed_packages import is_user_file, package_of

# With what the notebook puts around it, an error stays under 40 lines.
_MOST_LINES = 18
# The widest line that is shown whole: a message may hold somebody's whole data set.
_WIDEST = 1000
# A recursion repeats a frame; more than this many of them show nothing new.
_REPEATS = 3
# Calls that are kept, and exceptions of a group that are shown.
_MOST_FRAMES = 60
_MOST_OF_A_GROUP = 3
AnyCall = TypeVar("AnyCall")
_PACKAGE = Path(__file__).parents[1]
# The folders whose calls stand around the person's function in a worker.
_AROUND = (
    *(
        f"{_PACKAGE / folder}{os.sep}"
        for folder in ("failures", "launching", "sources", "supervisor", "transport", "worker")
    ),
    str(_PACKAGE / "script" / "ranks.py"),
)


def traceback_text(error: BaseException, sources: CellSources) -> str:
    """An exception and its causes, outermost cause first, as the person would want to read them."""
    parts = [_exception_text(link, sources) for link in _chain(TracebackException.from_exception(error))]
    return _shortened("\n\nwhich led to:\n\n".join(parts))


def frames_of(error: BaseException, sources: CellSources) -> tuple[Frame, ...]:
    """The calls that led to an exception, outermost first; a group's go on with those of its first exception."""
    return tuple(without_middle(list(_calls(TracebackException.from_exception(error), sources))))


def without_middle(calls: Sequence[AnyCall]) -> Sequence[AnyCall]:
    """The calls without those in the middle, so that a person can read them."""
    if len(calls) <= _MOST_FRAMES:
        return calls
    return [*calls[: _MOST_FRAMES // 3], *calls[-2 * _MOST_FRAMES // 3 :]]


def _calls(error: TracebackException, sources: CellSources) -> Iterator[Frame]:
    for repeated in _repeated(below_ours(error.stack)):
        for frame in repeated[:_REPEATS]:
            location = sources.location(frame.filename, frame.lineno or 0)
            yield Frame(location, frame.name, (frame.line or "")[:_WIDEST], own=is_user_file(frame.filename))
    # only a syntax error's has a file: the line that Python could not parse is no call, but what the person has to see
    if (filename := getattr(error, "filename", None)) is not None:
        location = sources.location(filename, int(error.lineno or 0))
        yield Frame(location, "<syntax>", (error.text or "").strip(), own=is_user_file(filename))
    # the first exception of a group
    for inner in (getattr(error, "exceptions", None) or ())[:1]:
        yield from _calls(inner, sources)


def frames_text(frames: Sequence[FrameSummary], sources: CellSources) -> list[str]:
    """Frames as lines of text: the person's with their source, others folded, but where it ended is named."""
    lines: list[str] = []
    groups = groupby(below_ours(frames), key=lambda frame: is_user_file(frame.filename))
    every = [(is_user, list(group)) for is_user, group in groups]
    for index, (is_user, group) in enumerate(every, start=1):
        # where it ended is named, unless it is in this package: its errors explain themselves
        is_end = index == len(every) and _PACKAGE not in Path(group[-1].filename).parents
        folded = [] if is_user else group[:-1] if is_end else group
        if folded:
            packages = ", ".join(dict.fromkeys(package_of(frame.filename) for frame in folded))
            lines.append(f"  … {len(folded)} frame{'s' if len(folded) > 1 else ''} in {packages}")
        for repeated in _repeated(group[len(folded) :]):
            for frame in repeated[:_REPEATS]:
                lines.append(f"  {sources.location(frame.filename, frame.lineno or 0)}, in {frame.name}")
                lines += [f"    {frame.line}"] if frame.line else []
            if more := len(repeated[_REPEATS:]):
                lines.append(f"  … the same call {more:,} times more")
    return lines


def _repeated(frames: Sequence[FrameSummary]) -> Iterator[list[FrameSummary]]:
    """Calls that follow each other, those of a recursion in one list."""
    for _, group in groupby(frames, key=lambda frame: (frame.filename, frame.lineno, frame.name)):
        yield list(group)


def below_ours(frames: Sequence[FrameSummary]) -> Sequence[FrameSummary]:
    """The calls below the worker's own: those of this package are of no use to a reader."""
    ours = [index for index, frame in enumerate(frames) if frame.filename.startswith(_AROUND)]
    return [frame for index, frame in enumerate(frames) if not ours or (index > ours[0] and index not in ours)]


def _chain(error: TracebackException) -> Iterator[TracebackException]:
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None:
        yield from _chain(before)
    yield error


def _exception_text(error: TracebackException, sources: CellSources) -> str:
    # a message may hold a traceback, as that of a data loader's worker does
    message = sources.in_words("".join(error.format_exception_only()).rstrip())
    lines = [*frames_text(error.stack, sources), message]
    every: list[TracebackException] = getattr(error, "exceptions", None) or []
    for number, inner in enumerate(every[:_MOST_OF_A_GROUP], start=1):
        lines.append(f"  {number} of {len(every)}:")
        lines += [f"  {line}" for line in _exception_text(inner, sources).split("\n")]
    if more := len(every[_MOST_OF_A_GROUP:]):
        lines.append(f"  … and {more} more")
    return "\n".join(lines)


def _shortened(text: str) -> str:
    lines = [line if len(line) <= _WIDEST else f"{line[:_WIDEST]} …" for line in text.split("\n")]
    if len(lines) <= _MOST_LINES:
        return "\n".join(lines)
    # the end shows more than the beginning, and one line counts what is left out
    first = _MOST_LINES // 3
    last = _MOST_LINES - first - 1
    return "\n".join([*lines[:first], f"  … {len(lines) - first - last} lines more …", *lines[-last:]])
