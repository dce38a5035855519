"""What plain text says of a run beside its lines: where each rank is now, what has happened to it, how it ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from accelerate_nb.events.bars import draws_a_bar
from accelerate_nb.events.model import Quiet
from accelerate_nb.events.readable import Readable
from accelerate_nb.events.view import Glance, RankView, RunView
from accelerate_nb.reports.amounts import ranks_text, time_text
from accelerate_nb.reports.colours import plain
from accelerate_nb.reports.curves import curves_of, names_of
from accelerate_nb.reports.digest import curve_text, row_of
from accelerate_nb.reports.failures import told
from accelerate_nb.reports.fitting import narrowed
from accelerate_nb.reports.wording import aligned

_MOST_RANKS = 8
_MOST_METRICS = 6
_MOST_CURVES = 20
_WIDEST = 200
# A rank that fails ends the others within a second or two; only where they go on is it news while the run is watched.
_GOING_ON = 3.0
_SELDOM, _SELDOMEST = 10.0, 300.0


def status_lines(ranks: Sequence[Glance]) -> Iterator[tuple[int | None, str]]:
    """
    What moves in each rank, or in all together where they are many: a rank, and its bars and newest metrics.

    There is none where no rank shows a bar or logs a metric.
    """
    names = list(dict.fromkeys(name for one in ranks for name in one.metrics))[:_MOST_METRICS]
    moving = [one for one in ranks if one.metrics or any(not bar.closed for bar in one.progress.values())]
    if len(moving) <= _MOST_RANKS:
        yield from ((one.rank, _status([one], names)) for one in moving)
    else:
        yield None, f"ranks {ranks_text([one.rank for one in moving])}: {_status(moving, names)}"


def undrawn(rank: Glance) -> Glance:
    """A rank without the bars that an open line of it draws, which says where they are to the very step."""
    drawn = [line.text.lstrip() for line in rank.open_lines if draws_a_bar(line, rank.progress.values())]
    left = {
        name: bar
        for name, bar in rank.progress.items()
        # tqdm begins with the bar's label, or without one with a number
        if not any(text.startswith(bar.label) or text[:1].isdigit() for text in drawn)
    }
    return replace(rank, progress=left)


def _status(ranks: Sequence[Glance], names: Sequence[str]) -> str:
    row = row_of(ranks, names)
    moving = any(not bar.closed for one in ranks for bar in one.progress.values())
    values = [f"{narrowed(plain(name), 40)} {value}" for name, value in zip(names, row.values, strict=True) if value]
    steps = [one.metrics[name].step for one in ranks for name in names if name in one.metrics]
    step = max((step for step in steps if step is not None), default=None)
    return narrowed(
        "  ".join([*(row.progress if moving else ()), *values, *([f"step {step}"] if step else [])]), _WIDEST
    )


class Seldom:
    """The moments to say where a run is, in a log that keeps every line: at first soon, then ever more seldom."""

    def __init__(self, now: float) -> None:
        self._pause = _SELDOM
        self._due = now + self._pause
        self._said: list[tuple[int | None, str]] = []

    def lines(self, now: float, ranks: Sequence[Glance]) -> list[tuple[int | None, str]]:
        """What to say now; mostly nothing, and nothing where nothing has moved."""
        if now < self._due:
            return []
        lines = [*status_lines(ranks)]
        self._pause = min(self._pause * 2, _SELDOMEST)
        self._due = now + self._pause
        if lines == self._said:
            return []
        self._said = lines
        return lines


class Happenings:
    """What happens to a run that is worth a line among its lines; each thing is said once."""

    def __init__(self) -> None:
        self._processes: dict[int, str] = {}
        self._failed: set[int] = set()
        self._stopping = False
        self._quiet: Quiet | None = None

    def news(self, view: RunView, ranks: Sequence[Glance], time: float) -> Iterator[str]:
        """What has happened since it was asked last; `time` is in seconds since 1970."""
        if self._have_restarted(ranks):
            self._failed.clear()
            yield "all processes have been started again"
        if view.state == "stopping" and not self._stopping:
            yield plain(view.detail) or "the run was asked to stop"
        self._stopping = view.state == "stopping"
        yield from self._failures(view, ranks, time)
        yield from self._silence(view.quiet)

    def _have_restarted(self, ranks: Sequence[Glance]) -> bool:
        """Whether another process has a rank's seat: a rank that runs says its process's number."""
        now = {one.rank: one.detail for one in ranks if one.state == "running" and one.detail}
        others = any(self._processes.get(rank, process) != process for rank, process in now.items())
        self._processes.update(now)
        return others

    def _failures(self, view: RunView, ranks: Sequence[Glance], time: float) -> Iterator[str]:
        for one in ranks if view.ended is None else ():
            failure = one.failure
            if failure is None or one.rank in self._failed or time < failure.time + _GOING_ON:
                continue
            self._failed.add(one.rank)
            if not (failure.ended_by_us or failure.lost_connection):
                yield f"{told(failure)}; other ranks go on"

    def _silence(self, quiet: Quiet | None) -> Iterator[str]:
        said, self._quiet = self._quiet, self._quiet if quiet is not None else None
        if quiet is not None and (said is None or quiet.seconds >= 2 * said.seconds):
            self._quiet = quiet
            yield narrowed(plain(quiet.text), 1500)


def summary(run: Readable) -> list[str]:
    """How a run that has ended went, if it logged metrics: its state and time, and the course of each metric."""
    ranks = [run.view.rank(rank) for rank in run.view.ranks]
    lines = metric_lines(ranks)
    return [head_of(run, ranks), *lines] if run.view.ended is not None and lines else []


def head_of(run: Readable, ranks: Sequence[RankView]) -> str:
    """What became of a run that has ended, and when; of each rank, where they differ."""
    states = {one.state: ranks_text([other.rank for other in ranks if other.state == one.state]) for one in ranks}
    apart = f" ({', '.join(f'{state}: {which}' for state, which in states.items())})" if len(states) > 1 else ""
    lasted = time_text((run.view.ended or run.started) - run.started)
    return f"{narrowed(plain(run.name), 100)} {run.view.state} after {lasted}{apart}"


def metric_lines(ranks: Sequence[RankView]) -> list[str]:
    """A line for the course of each metric."""
    names = names_of(ranks)
    if not names:
        return []
    more = [f"… and {len(names) - _MOST_CURVES} more metrics"] if len(names) > _MOST_CURVES else []
    return [*(f"  {line}" for line in aligned([*map(curve_text, curves_of(ranks, names[:_MOST_CURVES]))])), *more]
