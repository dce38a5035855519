"""A worker's exception as text and as frames: the person's own lines shown, the rest folded."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from traceback import FrameSummary, TracebackException

from accelerate_nb.events.model import Frame
from accelerate_nb.launching.sources import Sources

# With what the notebook puts around it, an error stays under 40 lines.
_MOST_LINES = 18
# The widest line that is shown whole: a message may hold somebody's whole data set.
_WIDEST = 1000
# A recursion repeats a frame; more than this many of them say nothing new.
_REPEATS = 3
# As many calls as a person looks through, and as many exceptions of a group.
_MOST_FRAMES = 60
_MOST_OF_A_GROUP = 3
_WORKER = str(Path(__file__).parent)
_OUR_OWN = Path(__file__).parents[1]
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
# What Python, numpy and torch.compile name code that is in no file of a person.
_MADE_UP = ("<frozen", "<__array_function__", "<eval_with_key>")


def traceback_text(error: BaseException, sources: Sources) -> str:
    """An exception and its causes, outermost cause first, as the person would want to read them."""
    parts = [_one(link, sources) for link in _chain(TracebackException.from_exception(error))]
    return _shortened("\n\nwhich led to:\n\n".join(parts))


def frames_of(error: BaseException, sources: Sources) -> tuple[Frame, ...]:
    """The calls that led to an exception, outermost first; a group's go on with those of its first exception."""
    calls = list(_calls(TracebackException.from_exception(error), sources))
    if len(calls) > _MOST_FRAMES:
        # where it began, and where it ended
        calls = [*calls[: _MOST_FRAMES // 3], *calls[-2 * _MOST_FRAMES // 3 :]]
    return tuple(calls)


def _calls(error: TracebackException, sources: Sources) -> Iterator[Frame]:
    for _, repeated in _repeated(below_ours(error.stack)):
        for frame in repeated[:_REPEATS]:
            place = sources.place(frame.filename, frame.lineno or 0)
            yield Frame(place, frame.name, (frame.line or "")[:_WIDEST], own=not _is_installed(frame))
    # only a syntax error's has a file
    if (filename := getattr(error, "filename", None)) is not None:
        yield _misspelled(error, filename, sources)
    for inner in _exceptions(error)[:1]:
        yield from _calls(inner, sources)


def _misspelled(error: TracebackException, filename: str, sources: Sources) -> Frame:
    """Where Python could not read on: no call, but what the person has to look at."""
    place = sources.place(filename, int(error.lineno or 0))
    return Frame(place, "<syntax>", (error.text or "").strip(), own=is_own(filename))


def frames_text(frames: Sequence[FrameSummary], sources: Sources) -> list[str]:
    """Frames as lines of text: the person's with their source, others folded, but where it ended is named."""
    lines: list[str] = []
    groups = [(foreign, list(group)) for foreign, group in groupby(below_ours(frames), key=_is_installed)]
    for index, (foreign, group) in enumerate(groups):
        if foreign:
            named = _last_named(group) if index == len(groups) - 1 else []
            folded = group[: len(group) - len(named)]
            if folded:
                lines.append(f"  … {len(folded)} frame{'s' if len(folded) > 1 else ''} in {_packages(folded)}")
            lines += _run(named, sources)
        else:
            lines += _run(group, sources)
    return lines


def _last_named(frames: Sequence[FrameSummary]) -> list[FrameSummary]:
    """The frame in which it ended, unless it is one of this package: its errors say what they have to."""
    return [] if _is_ours(frames[-1]) else [frames[-1]]


def _run(frames: Sequence[FrameSummary], sources: Sources) -> list[str]:
    """Frames that follow each other, where a recursion is folded as Python itself does it."""
    lines: list[str] = []
    for _, repeated in _repeated(frames):
        for frame in repeated[:_REPEATS]:
            lines += _frame(frame, sources)
        if more := len(repeated[_REPEATS:]):
            lines.append(f"  … the same call {more:,} times more")
    return lines


def _repeated(frames: Sequence[FrameSummary]) -> Iterator[tuple[object, list[FrameSummary]]]:
    for key, group in groupby(frames, key=lambda frame: (frame.filename, frame.lineno, frame.name)):
        yield key, list(group)


def below_ours(frames: Sequence[FrameSummary]) -> Sequence[FrameSummary]:
    """What the worker called: how the worker came to run, and what of ours raises an error in it, is nothing to be read."""
    ours = [index for index, frame in enumerate(frames) if frame.filename.startswith(_WORKER)]
    return [frame for index, frame in enumerate(frames) if not ours or (index > ours[0] and index not in ours)]


def _chain(error: TracebackException) -> Iterator[TracebackException]:
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None:
        yield from _chain(before)
    yield error


def _exceptions(error: TracebackException) -> list[TracebackException]:
    """The exceptions of a group; none of any other."""
    return list(getattr(error, "exceptions", None) or ())


def _one(error: TracebackException, sources: Sources) -> str:
    last = "".join(error.format_exception_only()).rstrip()
    return "\n".join([*frames_text(error.stack, sources), last, *_group(error, sources)])


def _group(error: TracebackException, sources: Sources) -> list[str]:
    """What a group holds, each behind its number and moved to the right."""
    every = _exceptions(error)
    lines = []
    for number, inner in enumerate(every[:_MOST_OF_A_GROUP], start=1):
        lines.append(f"  {number} of {len(every)}:")
        lines += [f"  {line}" for line in _one(inner, sources).split("\n")]
    if more := len(every[_MOST_OF_A_GROUP:]):
        lines.append(f"  … and {more} more")
    return lines


def _frame(frame: FrameSummary, sources: Sources) -> list[str]:
    place = sources.place(frame.filename, frame.lineno or 0)
    lines = [f"  {place}, in {frame.name}"]
    if frame.line:
        lines.append(f"    {frame.line}")
    return lines


def is_own(filename: str) -> bool:
    """Whether a file is the person's: no installed package, and none of this one, wherever that is installed."""
    path = Path(filename)
    installed = filename.startswith((*_INSTALLED, *_MADE_UP)) or not {"site-packages", "dist-packages"}.isdisjoint(
        path.parts
    )
    return not installed and _OUR_OWN not in path.parents


def _is_installed(frame: FrameSummary) -> bool:
    return not is_own(frame.filename)


def _is_ours(frame: FrameSummary) -> bool:
    return _OUR_OWN in Path(frame.filename).parents


def _packages(frames: Sequence[FrameSummary]) -> str:
    names = {_package(frame.filename): None for frame in frames}
    return ", ".join(names)


def _package(filename: str) -> str:
    path = Path(filename)
    if _OUR_OWN in path.parents:
        return _OUR_OWN.name
    for root in sorted(_INSTALLED, key=len, reverse=True):
        if filename.startswith(root):
            return path.relative_to(root).parts[0].removesuffix(".py")
    return "python"


def _shortened(text: str) -> str:
    lines = [line if len(line) <= _WIDEST else f"{line[:_WIDEST]} …" for line in text.split("\n")]
    if len(lines) <= _MOST_LINES:
        return "\n".join(lines)
    # the end says more than the beginning, and one line tells what is left out
    first = _MOST_LINES // 3
    last = _MOST_LINES - first - 1
    return "\n".join([*lines[:first], f"  … {len(lines) - first - last} lines more …", *lines[-last:]])
