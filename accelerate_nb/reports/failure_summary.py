"""A run's failure in the parts that a person reads: the first cause, its calls, what the other ranks did."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from accelerate_nb.events.event_types import Failure, Frame, Hang, Restart, cause
from accelerate_nb.events.terminal_lines import plain
from accelerate_nb.failures.worker_error import failure_line, hang_headline, other_failures
from accelerate_nb.reports.text_format import counted, narrowed, shortened

MOST_OTHERS = 8
_WIDEST_LINE = 300


@dataclass(frozen=True, slots=True)
class FailureCause:
    """The failure that led to the others; without a `rank` it is that of the whole run."""

    rank: int | None
    headline: str
    # the person's own calls with their lines, others folded; `every` has all of them where some are folded
    calls: tuple[str, ...]
    every: tuple[str, ...]
    exception_text: str = ""
    # what there is where the calls are not known
    traceback: str = ""
    advice: str = ""
    last_lines: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The calls and the exception, which lead to the mistake."""
        if self.calls:
            return "\n".join(filter(None, [*self.calls, self.exception_text]))
        return self.traceback or self.exception_text


def cause_of(failures: Sequence[Failure], size_limit: int) -> FailureCause | None:
    """The first cause of these failures, its texts of at most `size_limit` characters each; `None` where none failed by itself."""
    if all(failure.ended_by_us for failure in failures):
        return None
    first = cause(failures)
    folded = [*_folded(first.frames)]
    # causes of a cause are in the traceback alone
    chained = "\n\nwhich led to:\n\n" in first.traceback
    foreign = any(not frame.own for frame in first.frames)
    return FailureCause(
        rank=first.rank,
        headline=failure_line(first),
        calls=() if chained else (*shortened(plain("\n".join(folded)), size_limit).split("\n"),) if folded else (),
        every=(*shortened(plain("\n".join(_lines(first.frames))), size_limit).split("\n"),) if foreign else (),
        exception_text=shortened(plain(f"{first.type}: {first.message}" if first.message else first.type), size_limit),
        traceback=shortened(plain(first.traceback), size_limit),
        advice=shortened(plain(first.advice), 2000),
        last_lines=tuple(narrowed(plain(line), 1000) for line in first.last_lines[-20:]),
        others=(*other_failures(first, failures, MOST_OTHERS),),
    )


def cause_of_hang(hang: Hang, size_limit: int) -> FailureCause:
    """The summary of a timeout: which ranks waited where, and every stack."""
    return FailureCause(
        rank=None,
        headline=hang_headline(hang),
        calls=(*shortened(plain(hang.text), size_limit).split("\n"),),
        every=(*shortened(plain(hang.stacks), size_limit).split("\n"),) if hang.stacks else (),
    )


def restart_line(restart: Restart) -> str:
    """A restart in one line: `restart 1 of 3, after 0.1 s: rank 1 ended with SIGKILL`."""
    pause = f", after {restart.delay:g} s" if restart.delay else ""
    attempt = f"restart {restart.attempt} of {restart.max_restarts}"
    return narrowed(f"{attempt}{pause}: {plain(restart.reason)}", _WIDEST_LINE)


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
