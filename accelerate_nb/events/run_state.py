"""What a run's events add up to: the one thing that front ends read."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from threading import Lock
from typing import Any, Generic, TypeAlias, TypeVar

from accelerate_nb.events.model import (
    OVER,
    DeviceSample,
    Display,
    Event,
    Failure,
    HostSample,
    LogLine,
    Metric,
    Progress,
    Quiet,
    State,
    StateChange,
    Stream,
)

T = TypeVar("T")
Shown: TypeAlias = LogLine | Display

_MILLION = 1_000_000
# A loop that names its bars anew each time has no end of them; these many are kept of a rank, those that move first.
_MOST_BARS = 20


@dataclass(frozen=True, slots=True)
class News:
    """
    What ranks wrote and showed since a cursor, oldest first.

    `skipped` lines and displays came in between and are kept no longer; they were older than all of `shown`. `cursor`
    asks for what comes after these.
    """

    shown: tuple[Shown, ...]
    skipped: int
    cursor: int


@dataclass(frozen=True, slots=True)
class MetricNews:
    """The numbers that were logged since a cursor, oldest first; `skipped` of them are kept no longer one by one."""

    metrics: tuple[Metric, ...]
    skipped: int
    cursor: int


@dataclass(frozen=True, slots=True)
class Glance:
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
class RankView(Glance):
    """One rank at one moment: `lines` are its last whole ones, `series` its metrics over time, thinned evenly."""

    lines: tuple[LogLine, ...]
    series: dict[str, tuple[Metric, ...]]


class RunView:
    """
    The fold of a run's events: `apply` takes them in, everything else reads, from any thread.

    What it keeps is bounded, whatever ranks do: of each rank the last `tail` lines, of all ranks together the last
    `backlog` lines and displays in the order in which they came, of each metric about `points` values spread evenly over
    the run. None of these holds more than some megabytes.

    >>> view = RunView(size=2)
    >>> view.apply(LogLine(rank=0, stream="stdout", text="hello", time=0.0))
    >>> [line.text for line in view.since(0).shown]
    ['hello']
    """

    def __init__(self, size: int = 0, *, tail: int = 1000, backlog: int = 20_000, points: int = 1000) -> None:
        self._lock = Lock()
        self._tail = tail
        self._points = points
        self._ranks: dict[int, _Rank] = {rank: self._new_rank() for rank in range(size)}
        self._shown: _Bounded[Shown] = _Bounded(backlog, 32 * _MILLION)
        self._metrics: _Bounded[Metric] = _Bounded(backlog, backlog)
        self._host: HostSample | None = None
        self._quiet: Quiet | None = None
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
                    self._shown.append(event, _weight(event))
                case DeviceSample():
                    self._rank(event.rank).devices[event.device] = event
                case HostSample():
                    self._host = event
                case Quiet():
                    self._quiet = event if event.seconds else None
                case Failure():
                    self._rank(event.rank).failure = event

    def note_earlier(self, rank: int, lines: int) -> None:
        """So many lines of a rank came before those that are applied, and are kept no longer; for a run that is read back."""
        with self._lock:
            self._rank(rank).lines.count += lines
            self._shown.count += lines
            self._line_count += lines

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
            self._quiet = None
        else:
            self._rank(change.rank).take_state(change)

    def _rank(self, rank: int) -> _Rank:
        if rank not in self._ranks:
            self._ranks[rank] = self._new_rank()
        return self._ranks[rank]

    def _new_rank(self) -> _Rank:
        return _Rank(lines=_Bounded(self._tail, 4 * _MILLION))

    # ------------------------------------------------------------------------------------------------------- reading

    @property
    def state(self) -> State:
        """The state of the whole run."""
        return self._state

    @property
    def detail(self) -> str:
        """What was said to people when the run came into its state."""
        return self._detail

    @property
    def ended(self) -> float | None:
        """When the run came to its end, in seconds since 1970; `None` while it has not."""
        return self._ended

    @property
    def host(self) -> HostSample | None:
        """How busy the machine was when it was last looked at."""
        return self._host

    @property
    def quiet(self) -> Quiet | None:
        """What is to be said of a run from which nothing has come for long."""
        return self._quiet

    @property
    def changes(self) -> int:
        """How many events came so far: a front end that has seen this many has nothing to draw."""
        return self._changes

    @property
    def line_count(self) -> int:
        """How many whole lines all ranks wrote so far, also those that are kept no longer."""
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

    def since(self, cursor: int) -> News:
        """What ranks wrote and showed after `cursor`, over all ranks in the order in which it came; start with 0."""
        with self._lock:
            came = self._shown.count - cursor
            shown = self._shown.last(came)
            return News(shown, skipped=came - len(shown), cursor=self._shown.count)

    def metrics_since(self, cursor: int) -> MetricNews:
        """What all ranks logged after `cursor`, in the order in which it came; start with 0."""
        with self._lock:
            came = self._metrics.count - cursor
            metrics = self._metrics.last(came)
            return MetricNews(metrics, skipped=came - len(metrics), cursor=self._metrics.count)

    def glances(self) -> tuple[Glance, ...]:
        """All ranks at this moment, in order, without their lines and series: cheap enough for ten times a second."""
        with self._lock:
            return tuple(one.glance(rank) for rank, one in sorted(self._ranks.items()))

    def open_lines(self) -> tuple[LogLine, ...]:
        """The lines that have not ended yet, such as progress bars, in the order of ranks."""
        with self._lock:
            return tuple(line for _, rank in sorted(self._ranks.items()) for line in rank.open_lines.values())

    def tail(self, rank: int, lines: int) -> tuple[LogLine, ...]:
        """The last whole lines of a rank, oldest first."""
        with self._lock:
            return self._ranks[rank].lines.last(lines) if rank in self._ranks else ()

    def line_count_of(self, rank: int) -> int:
        """How many whole lines a rank wrote so far."""
        with self._lock:
            return self._ranks[rank].lines.count if rank in self._ranks else 0

    def rank(self, rank: int) -> RankView:
        """Everything about a rank at this moment; a rank that is not known yet is one that has written nothing."""
        with self._lock:
            return (self._ranks.get(rank) or self._new_rank()).seen(rank)


@dataclass(slots=True)
class _Rank:
    """What one rank's events add up to so far."""

    lines: _Bounded[LogLine]
    state: State = "starting"
    detail: str = ""
    open_lines: dict[Stream, LogLine] = field(default_factory=dict)
    series: dict[str, _Series] = field(default_factory=dict)
    progress: dict[str, Progress] = field(default_factory=dict)
    devices: dict[str, DeviceSample] = field(default_factory=dict)
    failure: Failure | None = None

    def take_state(self, change: StateChange) -> None:
        if change.state == "starting":  # also when it starts anew: what ended the former one is over
            self.failure = None
            self.open_lines.clear()
        self.state, self.detail = change.state, change.detail

    def take_metric(self, metric: Metric, points: int) -> None:
        if metric.name not in self.series:
            self.series[metric.name] = _Series(points)
        self.series[metric.name].append(metric)

    def take_progress(self, progress: Progress) -> None:
        # in the order in which they began, those that have ended behind them: nested bars keep their order while they move
        name = progress.bar or progress.label
        before = self.progress.get(name)
        if progress.closed or (before is not None and before.closed):
            self.progress.pop(name, None)
        self.progress[name] = progress
        if len(self.progress) > _MOST_BARS:
            del self.progress[
                next((one for one, bar in self.progress.items() if bar.closed), next(iter(self.progress)))
            ]

    def glance(self, rank: int) -> Glance:
        return Glance(**self._short(rank))

    def seen(self, rank: int) -> RankView:
        return RankView(
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


class _Bounded(Generic[T]):
    """The newest of many items: at most so many, and not more than so much in all; it counts them all."""

    __slots__ = ("_items", "_most", "_size", "_size_limit", "_sizes", "count")

    def __init__(self, most: int, size_limit: int) -> None:
        self._items: deque[T] = deque()
        self._sizes: deque[int] = deque()
        self._most = most
        self._size = 0
        self._size_limit = size_limit
        self.count = 0

    def append(self, item: T, size: int) -> None:
        self.count += 1
        self._items.append(item)
        self._sizes.append(size)
        self._size += size
        # the newest stays, however large it is
        while len(self._items) > self._most or (self._size > self._size_limit and len(self._items) > 1):
            self._items.popleft()
            self._size -= self._sizes.popleft()

    def last(self, number: int) -> tuple[T, ...]:
        return tuple(islice(reversed(self._items), max(number, 0)))[::-1]


class _Series:
    """The values of one metric, thinned evenly: when it is full, every second goes, and from then on twice as few come in."""

    __slots__ = ("_came", "_every", "_kept", "_most", "newest")

    def __init__(self, most: int) -> None:
        self._most = most
        self._every = 1
        self._came = 0
        self._kept: list[Metric] = []
        self.newest: Metric | None = None

    def append(self, metric: Metric) -> None:
        if self._came % self._every == 0:
            self._kept.append(metric)
        self._came += 1
        self.newest = metric
        if len(self._kept) > self._most:
            self._kept = self._kept[::2]
            self._every *= 2

    def points(self) -> tuple[Metric, ...]:
        """The values that were kept, the newest always among them."""
        kept = tuple(self._kept)
        return kept if self.newest is None or kept[-1] is self.newest else (*kept, self.newest)


def _weight(display: Display) -> int:
    """About how many characters a display holds."""
    return sum(len(value) for value in display.data.values() if isinstance(value, (str, bytes)))
