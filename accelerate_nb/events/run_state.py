"""The state of a run, made of its events: the one object that front ends read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, Protocol, TypeAlias

from accelerate_nb.events.bounded_log import BoundedLog, MetricSeries
from accelerate_nb.events.model import (
    OVER,
    DeviceSample,
    Display,
    Event,
    Failure,
    FirstStep,
    Hang,
    HostSample,
    IdleWarning,
    LogLine,
    Metric,
    Progress,
    Restart,
    State,
    StateChange,
    Stream,
)

Shown: TypeAlias = LogLine | Display

_MILLION = 1_000_000
# A loop that renames its bars each time has no end of them; these many are kept of a rank, those that move first.
_MOST_BARS = 20
# Of a run that restarts again and again, the newest restarts are kept.
_MOST_RESTARTS = 100


@dataclass(frozen=True, slots=True)
class NewOutput:
    """
    The output of ranks since a cursor, oldest first.

    `skipped` lines and displays came in between and are kept no longer; they were older than all of `shown`. `cursor`
    is the cursor for what comes after these.
    """

    shown: tuple[Shown, ...]
    skipped: int
    cursor: int


@dataclass(frozen=True, slots=True)
class NewMetrics:
    """The numbers that were logged since a cursor, oldest first; `skipped` of them are kept no longer one by one."""

    metrics: tuple[Metric, ...]
    skipped: int
    cursor: int


@dataclass(frozen=True, slots=True)
class RankSummary:
    """One rank at one moment, without what is long: `metrics` are the newest of each name, `progress` of each bar."""

    rank: int
    state: State
    detail: str
    line_count: int
    open_lines: tuple[LogLine, ...]
    metrics: dict[str, Metric]
    progress: dict[str, Progress]
    devices: dict[str, DeviceSample]
    failure: Failure | None


@dataclass(frozen=True, slots=True)
class RankState(RankSummary):
    """One rank at one moment: `lines` are its last whole ones, `series` its metrics over time, thinned evenly."""

    lines: tuple[LogLine, ...]
    series: dict[str, tuple[Metric, ...]]


class RunState:
    """
    The state that a run's events add up to: `apply` takes them in, everything else reads, from any thread.

    What it keeps is bounded, whatever ranks do: of each rank the last `tail` lines, of all ranks together the last
    `backlog` lines and displays in the order in which they came, of each metric about `points` values spread evenly over
    the run. None of these holds more than some megabytes.

    >>> view = RunState(size=2)
    >>> view.apply(LogLine(rank=0, stream="stdout", text="hello", time=0.0))
    >>> [line.text for line in view.since(0).shown]
    ['hello']
    """

    def __init__(self, size: int = 0, *, tail: int = 1000, backlog: int = 20_000, points: int = 1000) -> None:
        self._lock = Lock()
        self._tail = tail
        self._points = points
        self._ranks: dict[int, _RankFold] = {rank: self._new_rank() for rank in range(size)}
        self._shown: BoundedLog[Shown] = BoundedLog(backlog, 32 * _MILLION)
        self._metrics: BoundedLog[Metric] = BoundedLog(backlog, backlog)
        self._host: HostSample | None = None
        self._idle_warning: IdleWarning | None = None
        self._hang: Hang | None = None
        self._restarts: tuple[Restart, ...] = ()
        self._has_stepped = False
        self._ended: float | None = None
        self._line_count = 0
        self._changes = 0
        self._state: State = "starting"
        self._detail = ""

    def apply(self, event: Event) -> None:
        """Take an event in."""
        with self._lock:
            self._changes += 1
            match event:
                case LogLine():
                    self._take_line(event)
                case StateChange():
                    self._take_state(event)
                case Metric():
                    self._metrics.append(event, 1)
                    self._rank(event.rank).take_metric(event, self._points)
                case Progress():
                    self._rank(event.rank).take_progress(event)
                case Display():
                    characters = (len(value) for value in event.data.values() if isinstance(value, (str, bytes)))
                    self._shown.append(event, sum(characters))
                case DeviceSample():
                    self._rank(event.rank).devices[event.device] = event
                case Failure():
                    self._rank(event.rank).failure = event
                case HostSample() | IdleWarning() | Hang() | FirstStep() | Restart():
                    self._take_of_all(event)

    def apply_lines(self, lines: Iterable[LogLine]) -> None:
        """Take lines in, which come by the thousand, at once."""
        with self._lock:
            self._changes += 1
            for line in lines:
                self._take_line(line)

    def note_earlier(self, rank: int, lines: int) -> None:
        """So many lines of a rank came before those that are applied, and are kept no longer; for a run that is read back."""
        with self._lock:
            self._rank(rank).lines.count += lines
            self._shown.count += lines
            self._line_count += lines

    def replace_open_lines(self, lines: Iterable[LogLine]) -> None:
        """Have these open lines and no others; for a run that another process conducts."""
        with self._lock:
            for rank in self._ranks.values():
                rank.open_lines.clear()
            for line in lines:
                self._rank(line.rank).open_lines[line.stream] = line
            self._changes += 1

    def _take_line(self, line: LogLine) -> None:
        rank = self._ranks.get(line.rank) or self._rank(line.rank)
        if line.open:
            rank.open_lines[line.stream] = line
            return
        rank.open_lines.pop(line.stream, None)
        size = len(line.text)
        rank.lines.append(line, size)
        self._shown.append(line, size)
        self._line_count += 1

    def _take_state(self, change: StateChange) -> None:
        if change.rank is None:
            self._state, self._detail = change.state, change.detail
            self._ended = change.time if change.state in OVER else None
            self._idle_warning = None
        else:
            self._rank(change.rank).take_state(change)

    def _take_restart(self, restart: Restart) -> None:
        self._restarts = (*self._restarts, restart)[-_MOST_RESTARTS:]
        self._has_stepped = False
        self._idle_warning = None
        for rank in self._ranks.values():
            # bars of processes that are gone move no more
            rank.progress.clear()

    def _take_of_all(self, event: HostSample | IdleWarning | Hang | FirstStep | Restart) -> None:
        if isinstance(event, HostSample):
            self._host = event
        elif isinstance(event, FirstStep):
            self._has_stepped = True
        elif isinstance(event, Restart):
            self._take_restart(event)
        elif isinstance(event, IdleWarning):
            self._idle_warning = event if event.seconds else None
        else:
            self._hang = event

    def _rank(self, rank: int) -> _RankFold:
        if rank not in self._ranks:
            self._ranks[rank] = self._new_rank()
        return self._ranks[rank]

    def _new_rank(self) -> _RankFold:
        return _RankFold(lines=BoundedLog(self._tail, 4 * _MILLION))

    # ------------------------------------------------------------------------------------------------------- reading

    @property
    def state(self) -> State:
        """The state of the whole run."""
        return self._state

    @property
    def detail(self) -> str:
        """The message that people were shown when the run came into its state."""
        return self._detail

    @property
    def ended(self) -> float | None:
        """The end of the run, in seconds since 1970; `None` while it goes on."""
        return self._ended

    @property
    def host(self) -> HostSample | None:
        """The load of the machine at its last sample."""
        return self._host

    @property
    def idle_warning(self) -> IdleWarning | None:
        """The warning about a run that has been silent for long."""
        return self._idle_warning

    @property
    def hang(self) -> Hang | None:
        """The positions of the ranks when the run's time was over; `None` where it was not."""
        return self._hang

    @property
    def restarts(self) -> tuple[Restart, ...]:
        """The restarts so far, oldest first; the newest ones of very many."""
        return self._restarts

    @property
    def has_stepped(self) -> bool:
        """Whether some rank has made an optimizer step in this attempt."""
        return self._has_stepped

    @property
    def changes(self) -> int:
        """The number of events so far: a front end that has seen this many has nothing to draw."""
        return self._changes

    @property
    def line_count(self) -> int:
        """The number of whole lines that all ranks wrote so far, also those that are kept no longer."""
        return self._line_count

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that are known, in order."""
        with self._lock:
            return tuple(sorted(self._ranks))

    @property
    def failures(self) -> tuple[Failure, ...]:
        """One for each rank that failed, in the order of ranks."""
        with self._lock:
            return tuple(rank.failure for _, rank in sorted(self._ranks.items()) if rank.failure is not None)

    def since(self, cursor: int) -> NewOutput:
        """The output of ranks after `cursor`, over all ranks in the order in which it came; start with 0."""
        with self._lock:
            came = self._shown.count - cursor
            shown = self._shown.last(came)
            return NewOutput(shown, skipped=came - len(shown), cursor=self._shown.count)

    def metrics_since(self, cursor: int) -> NewMetrics:
        """The metrics of all ranks after `cursor`, in the order in which they came; start with 0."""
        with self._lock:
            came = self._metrics.count - cursor
            metrics = self._metrics.last(came)
            return NewMetrics(metrics, skipped=came - len(metrics), cursor=self._metrics.count)

    def glances(self) -> tuple[RankSummary, ...]:
        """All ranks at this moment, in order, without their lines and series: cheap enough for ten times a second."""
        with self._lock:
            return tuple(item.glance(rank) for rank, item in sorted(self._ranks.items()))

    def open_lines(self) -> tuple[LogLine, ...]:
        """The lines that have not ended yet, such as progress bars, in the order of ranks."""
        with self._lock:
            return tuple(line for _, rank in sorted(self._ranks.items()) for line in rank.open_lines.values())

    def tail(self, rank: int, lines: int) -> tuple[LogLine, ...]:
        """The last whole lines of a rank, oldest first."""
        with self._lock:
            return self._ranks[rank].lines.last(lines) if rank in self._ranks else ()

    def line_count_of(self, rank: int) -> int:
        """The number of whole lines that a rank wrote so far."""
        with self._lock:
            return self._ranks[rank].lines.count if rank in self._ranks else 0

    def rank(self, rank: int) -> RankState:
        """Everything about a rank at this moment; a rank that is not known yet is one that has written nothing."""
        with self._lock:
            return (self._ranks.get(rank) or self._new_rank()).seen(rank)


@dataclass(slots=True)
class _RankFold:
    """The state of one rank, made of its events so far."""

    lines: BoundedLog[LogLine]
    state: State = "starting"
    detail: str = ""
    open_lines: dict[Stream, LogLine] = field(default_factory=dict)
    series: dict[str, MetricSeries] = field(default_factory=dict)
    progress: dict[str, Progress] = field(default_factory=dict)
    devices: dict[str, DeviceSample] = field(default_factory=dict)
    failure: Failure | None = None

    def take_state(self, change: StateChange) -> None:
        if change.state == "starting":  # also when it restarts: the end of the former one is over
            self.failure = None
            self.open_lines.clear()
        self.state, self.detail = change.state, change.detail

    def take_metric(self, metric: Metric, points: int) -> None:
        if metric.name not in self.series:
            self.series[metric.name] = MetricSeries(points)
        self.series[metric.name].append(metric)

    def take_progress(self, progress: Progress) -> None:
        # in the order in which they began, those that have ended behind them: nested bars keep their order while they move
        name = progress.bar or progress.label
        before = self.progress.get(name)
        if progress.closed or (before is not None and before.closed):
            self.progress.pop(name, None)
        self.progress[name] = progress
        if len(self.progress) > _MOST_BARS:
            closed = (item for item, bar in self.progress.items() if bar.closed)
            del self.progress[next(closed, next(iter(self.progress)))]

    def glance(self, rank: int) -> RankSummary:
        return RankSummary(**self._short(rank))

    def seen(self, rank: int) -> RankState:
        return RankState(
            **self._short(rank),
            lines=self.lines.last(self.lines.count),
            series={name: series.points() for name, series in self.series.items()},
        )

    def _short(self, rank: int) -> dict[str, Any]:
        return {
            "rank": rank,
            "state": self.state,
            "detail": self.detail,
            "line_count": self.lines.count,
            "open_lines": tuple(self.open_lines.values()),
            "metrics": {name: series.newest for name, series in self.series.items() if series.newest is not None},
            "progress": dict(self.progress),
            "devices": dict(self.devices),
            "failure": self.failure,
        }


class RunInfo(Protocol):
    """A run that goes on or has ended, or what it left in its folder."""

    @property
    def name(self) -> str:
        """The shown name of the function that runs."""

    @property
    def why(self) -> str:
        """The number of workers, what placed them, and why."""

    @property
    def folder(self) -> Path:
        """The folder of every rank's output."""

    @property
    def view(self) -> RunState:
        """Everything that has happened so far."""

    @property
    def started(self) -> float:
        """The start of the run, in seconds since 1970."""
