"""A worker's exception as text: the person's own lines shown, the rest folded."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from traceback import FrameSummary, TracebackException

from accelerate_nb.launching.sources import Sources

# With what the notebook puts around it, an error stays under 40 lines.
_MOST_LINES = 18
# The widest line that is shown whole: a message may hold somebody's whole data set.
_WIDEST = 1000
# A recursion repeats a frame; more than this many of them say nothing new.
_REPEATS = 3
_OUR_OWN = str(Path(__file__).parent)
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


def traceback_text(error: BaseException, sources: Sources) -> str:
    """An exception and its causes, outermost cause first, as the person would want to read them."""
    parts = [_one(link, sources) for link in _chain(TracebackException.from_exception(error))]
    return _shortened("\n\nwhich led to:\n\n".join(parts))


def frames_text(frames: Sequence[FrameSummary], sources: Sources) -> list[str]:
    """Frames as lines of text: the person's with their source, others folded, but the last one is always named."""
    lines: list[str] = []
    for foreign, group in groupby(_below_ours(frames), key=_is_installed):
        run = list(group)
        if foreign and len(run) > 1:
            *folded, last = run
            lines.append(f"  … {len(folded)} frame{'s' if len(folded) > 1 else ''} in {_packages(folded)}")
            run = [last]
        lines += _run(run, sources)
    return lines


def _run(frames: Sequence[FrameSummary], sources: Sources) -> list[str]:
    """Frames that follow each other, where a recursion is folded as Python itself does it."""
    lines: list[str] = []
    for _, group in groupby(frames, key=lambda frame: (frame.filename, frame.lineno, frame.name)):
        repeated = list(group)
        for frame in repeated[:_REPEATS]:
            lines += _frame(frame, sources)
        if more := len(repeated[_REPEATS:]):
            lines.append(f"  … the same call {more:,} times more")
    return lines


def _below_ours(frames: Sequence[FrameSummary]) -> Sequence[FrameSummary]:
    """What the worker called: how the worker came to run, and what of ours raises an error in it, is nothing to be read."""
    ours = [index for index, frame in enumerate(frames) if frame.filename.startswith(_OUR_OWN)]
    return [frame for index, frame in enumerate(frames) if not ours or (index > ours[0] and index not in ours)]


def _chain(error: TracebackException) -> Iterator[TracebackException]:
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None:
        yield from _chain(before)
    yield error


def _one(error: TracebackException, sources: Sources) -> str:
    last = "".join(error.format_exception_only()).rstrip()
    return "\n".join([*frames_text(error.stack, sources), last])


def _frame(frame: FrameSummary, sources: Sources) -> list[str]:
    place = sources.place(frame.filename, frame.lineno or 0)
    lines = [f"  {place}, in {frame.name}"]
    if frame.line:
        lines.append(f"    {frame.line}")
    return lines


def _is_installed(frame: FrameSummary) -> bool:
    return frame.filename.startswith((*_INSTALLED, "<frozen"))


def _packages(frames: Sequence[FrameSummary]) -> str:
    names = {_package(frame.filename): None for frame in frames}
    return ", ".join(names)


def _package(filename: str) -> str:
    for root in sorted(_INSTALLED, key=len, reverse=True):
        if filename.startswith(root):
            return Path(filename).relative_to(root).parts[0].removesuffix(".py")
    return "python"


def _shortened(text: str) -> str:
    lines = [line if len(line) <= _WIDEST else f"{line[:_WIDEST]} …" for line in text.split("\n")]
    if len(lines) <= _MOST_LINES:
        return "\n".join(lines)
    # the end says more than the beginning, and one line tells what is left out
    first = _MOST_LINES // 3
    last = _MOST_LINES - first - 1
    return "\n".join([*lines[:first], f"  … {len(lines) - first - last} lines more …", *lines[-last:]])
