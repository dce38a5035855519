"""Why a run failed, in the parts that a person reads: the first cause, its calls, what the other ranks did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from accelerate_nb.config.ranks import of_ranks
from accelerate_nb.events.causes import cause
from accelerate_nb.events.model import Failure, Frame
from accelerate_nb.reports.amounts import counted, ranks_text
from accelerate_nb.reports.colours import plain
from accelerate_nb.reports.fitting import narrowed, shortened

_MOST_OTHERS = 8
_WIDEST_LINE = 300


@dataclass(frozen=True, slots=True)
class Cause:
    """
    The failure that led to the others.

    `calls` are the person's own calls with their lines, others folded; `every` names all of them where some are folded,
    `said` is the exception in full, and `traceback` is what there is instead where the calls are not known.
    """

    rank: int
    headline: str
    calls: tuple[str, ...]
    every: tuple[str, ...]
    said: str
    traceback: str
    advice: str
    last_lines: tuple[str, ...]
    others: tuple[str, ...]

    @property
    def text(self) -> str:
        """What one reads to find the mistake: the calls and the exception."""
        return "\n".join([*self.calls, self.said]) if self.calls else self.traceback or self.said


def cause_of(failures: Sequence[Failure], room: int) -> Cause | None:
    """The first cause of these failures, its texts of at most `room` characters each; `None` where none failed by itself."""
    if all(one.ended_by_us for one in failures):
        return None
    first = cause(failures)
    folded = [*_folded(first.frames)]
    # causes of a cause are told in the traceback alone
    chained = "\n\nwhich led to:\n\n" in first.traceback
    foreign = any(not frame.own for frame in first.frames)
    return Cause(
        rank=first.rank,
        headline=narrowed(_headline(first), _WIDEST_LINE),
        calls=() if chained else (*shortened(plain("\n".join(folded)), room).split("\n"),) if folded else (),
        every=(*shortened(plain("\n".join(_lines(first.frames))), room).split("\n"),) if foreign else (),
        said=shortened(plain(f"{first.type}: {first.message}" if first.message else first.type), room),
        traceback=shortened(plain(first.traceback), room),
        advice=shortened(plain(first.advice), 2000),
        last_lines=tuple(narrowed(plain(line), 1000) for line in first.last_lines[-20:]),
        others=(*_others([one for one in failures if one is not first]),),
    )


def told(failure: Failure) -> str:
    """A failure in one line."""
    return narrowed(_headline(failure), _WIDEST_LINE)


def _headline(failure: Failure) -> str:
    message = plain(failure.message.partition("\n")[0])
    ended = "ended with" if failure.exit_code is not None else "stopped with"
    return f"rank {failure.rank} {ended} {plain(failure.type)}{': ' if message else ''}{message}"


def _folded(frames: Sequence[Frame]) -> Iterator[str]:
    """The person's own calls with their lines; of others that follow each other the number, and the last by name."""
    for own, group in groupby(frames, key=lambda frame: frame.own):
        run = list(group)
        if not own and len(run) > 1:
            yield f"  … {counted(len(run) - 1, 'call')} folded"
            run = run[-1:]
        yield from _lines(run)


def _lines(frames: Sequence[Frame]) -> Iterator[str]:
    for frame in frames:
        yield f"  {frame.place}, in {frame.function}"
        if frame.source:
            yield f"    {frame.source}"


def _others(failures: Sequence[Failure]) -> Iterator[str]:
    """A line for each rank that failed by itself, and one for all that only followed."""
    own = [one for one in failures if not (one.lost_connection or one.ended_by_us)]
    yield from (told(one) for one in own[:_MOST_OTHERS])
    if more := own[_MOST_OTHERS:]:
        yield f"{_named(more)} failed by {_themselves(more)}, too"
    if lost := [one for one in failures if one.lost_connection and not one.ended_by_us]:
        yield f"{_named(lost)} lost {'its connection' if len(lost) == 1 else 'their connections'}"
    if ended := [one for one in failures if one.ended_by_us]:
        yield f"{_named(ended)} {'was' if len(ended) == 1 else 'were'} ended because of it"


def _named(failures: Sequence[Failure]) -> str:
    return of_ranks([one.rank for one in failures], ranks_text)


def _themselves(failures: Sequence[Failure]) -> str:
    return "itself" if len(failures) == 1 else "themselves"
