"""Status lines of a run in plain text, beside its output: where each rank is, what has happened, how it ended."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from accelerate_nb.events.event_types import IdleWarning, NodeRanks
from accelerate_nb.events.run_state import RankSummary, RunInfo, RunState, logged_names
from accelerate_nb.events.terminal_lines import draws_a_bar, plain
from accelerate_nb.failures.worker_error import failure_line
from accelerate_nb.reports import summary as summaries
from accelerate_nb.reports.metric_curves import curves_of, names_of
from accelerate_nb.reports.summary import restart_line
from accelerate_nb.reports.text_format import aligned, narrowed, ranks_text, time_text

_MOST_RANKS = 8
_MOST_NODES = 16
_MOST_METRICS = 6
_MOST_CURVES = 20
_WIDEST = 200
# A rank that fails ends the others within a second or two; only where they go on is it news while the run is watched.
_GOING_ON = 3.0
_SELDOM, _SELDOMEST = 10.0, 300.0


# A line of status: the ranks whose it is together, none where the text names them, and its text.
StatusLine: TypeAlias = tuple[tuple[int, ...], str]


def status_lines(ranks: Sequence[RankSummary], nodes: Sequence[NodeRanks] = ()) -> Iterator[StatusLine]:
    """A line for each rank that shows a bar or logs a metric, or where they are many for each node; equal ones stand once."""
    names = logged_names(name for rank in ranks for name in rank.metrics)[:_MOST_METRICS]
    moving = [
        rank for rank in ranks if logged_names(rank.metrics) or any(not bar.closed for bar in rank.progress.values())
    ]
    if len(moving) <= _MOST_RANKS:
        by_text: dict[str, list[int]] = {}
        for rank in moving:
            by_text.setdefault(_status([rank], names), []).append(rank.rank)
        yield from ((tuple(numbers), text) for text, numbers in by_text.items())
        return
    for node, members in summaries.ranks_of_nodes(moving, nodes if len(nodes) <= _MOST_NODES else ()):
        if members:
            label = f"{node}, ranks" if node else "ranks"
            yield (), f"{label} {ranks_text([rank.rank for rank in members])}: {_status(members, names)}"


def undrawn(rank: RankSummary) -> RankSummary:
    """A rank without the bars that an open line of it draws, which shows where they are to the very step."""
    drawn = [line.text.lstrip() for line in rank.open_lines if draws_a_bar(line, rank.progress.values())]
    left = {
        name: bar
        for name, bar in rank.progress.items()
        # tqdm begins with the bar's label, or without one with a number
        if not any(text.startswith(bar.label) or text[:1].isdigit() for text in drawn)
    }
    return replace(rank, progress=left)


def _status(ranks: Sequence[RankSummary], names: Sequence[str]) -> str:
    row = summaries.row_of(ranks, names)
    moving = any(not bar.closed for rank in ranks for bar in rank.progress.values())
    values = [f"{narrowed(plain(name), 40)} {value}" for name, value in zip(names, row.values, strict=True) if value]
    steps = [rank.metrics[name].step for rank in ranks for name in names if name in rank.metrics]
    step = max((step for step in steps if step is not None), default=None)
    parts = [*(row.progress if moving else ()), *values, *([f"step {step}"] if step else [])]
    return narrowed("  ".join(parts), _WIDEST)


class StatusSchedule:
    """The schedule of status lines in a log that keeps every line: at first soon, then ever more seldom."""

    def __init__(self, now: float) -> None:
        self._pause = _SELDOM
        self._due = now + self._pause
        self._shown: list[StatusLine] = []

    def lines(self, now: float, ranks: Sequence[RankSummary], nodes: Sequence[NodeRanks] = ()) -> list[StatusLine]:
        """The status lines that are due; mostly none, and none where nothing has moved."""
        if now < self._due:
            return []
        lines = [*status_lines(ranks, nodes)]
        self._pause = min(self._pause * 2, _SELDOMEST)
        self._due = now + self._pause
        if lines == self._shown:
            return []
        self._shown = lines
        return lines


class StatusLines:
    """Lines on what happens to a run, each shown once."""

    def __init__(self) -> None:
        self._attempt = 0
        self._failed: set[int] = set()
        self._stopping = False
        self._shown_warning: IdleWarning | None = None
        self._profile = 0

    def news(self, view: RunState, ranks: Sequence[RankSummary], time: float) -> Iterator[str]:
        """Lines on what has happened since the last call; `time` is in seconds since 1970."""
        for restart in view.restarts:
            if restart.attempt > self._attempt:
                self._attempt = restart.attempt
                self._failed.clear()
                yield restart_line(restart)
        if view.state == "stopping" and not self._stopping:
            yield plain(view.detail) or "the run was asked to stop"
        self._stopping = view.state == "stopping"
        for rank in ranks if view.ended is None else ():
            failure = rank.failure
            if failure is None or rank.rank in self._failed or time < failure.time + _GOING_ON:
                continue
            self._failed.add(rank.rank)
            if not (failure.ended_by_us or failure.lost_connection):
                yield f"{failure_line(failure)}; other ranks go on"
        warning, shown = view.idle_warning, self._shown_warning
        if warning is None or shown is None or warning.seconds >= 2 * shown.seconds:
            self._shown_warning = warning
            if warning is not None:
                yield narrowed(plain(warning.text), 1500)
        # of several ranks, the one that is there first
        if (found := summaries.newest_profile(ranks)) is not None and found[0].number > self._profile:
            self._profile = found[0].number
            yield summaries.profile_line(found[0])


def summary(run: RunInfo) -> list[str]:
    """A run that has ended: its state and its time, of each rank where they differ, and the course of each metric if it has any."""
    ranks = [run.view.rank(rank) for rank in run.view.ranks]
    states = {rank.state: ranks_text([other.rank for other in ranks if other.state == rank.state]) for rank in ranks}
    apart = f" ({', '.join(f'{state}: {which}' for state, which in states.items())})" if len(states) > 1 else ""
    lasted = time_text((run.view.ended or run.started) - run.started)
    head = f"{narrowed(plain(run.name), 100)} {run.view.state} after {lasted}{apart}"
    lines = [", ".join([head, *summaries.unread_text(run.view)])]
    if names := logged_names(names_of(ranks)):
        lines += [f"  {line}" for line in aligned([*map(summaries.curve_text, curves_of(ranks, names[:_MOST_CURVES]))])]
        lines += [f"… and {len(names) - _MOST_CURVES} more metrics"] if len(names) > _MOST_CURVES else []
        lines += [f"  {cause}" for cause in summaries.step_causes(ranks, run.view.nodes, is_over=True)]
    return lines
