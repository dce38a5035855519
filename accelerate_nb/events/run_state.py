"""The state of a run, made of its events: the one object that front ends read, and below it the state of each rank."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar

from msgspec import structs

from accelerate_nb.events import event_types
from accelerate_nb.events.event_codec import harmless

T = TypeVar("T")
# The prefixes of what `runtime/observability/step_metrics.py` reports; `epoch` is where in the training a step is.
AUTOMATIC_PREFIXES = ("speed/", "optimizer/", "memory/")
EPOCH = "epoch"
# Of these each rank reports its own part: all ranks together have the sum. Of any other number, whatever it is called, the mean is shown.
SUMMED = frozenset({"speed/samples_per_s", "speed/tokens_per_s"})


@dataclass(frozen=True, slots=True)
class NewItems(Generic[T]):
    """The items of a log since a cursor, oldest first, and the cursor for those after; `skipped` older ones are kept no longer."""

    items: tuple[T, ...]
    skipped: int
    cursor: int


class BoundedLog(Generic[T]):
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
        """The newest items, at most `number`, in their order."""
        return tuple(islice(reversed(self._items), max(number, 0)))[::-1]

    def since(self, cursor: int) -> NewItems[T]:
        """The items after a cursor; start with 0."""
        items = self.last(self.count - cursor)
        return NewItems(items, self.count - cursor - len(items), self.count)


class MetricSeries:
    """The values of one metric, thinned evenly: when it is full, every second goes, and from then on twice as few come in."""

    __slots__ = ("_came", "_every", "_kept", "_most", "_special", "newest")

    def __init__(self, most: int) -> None:
        self._most = most
        self._every = 1
        self._came = 0
        self._kept: list[event_types.Metric] = []
        # with their numbers, what is not thinned away: the lowest and the highest value, the newest that is no number, and the first
        # of the newest that are none, where a training broke
        self._special: dict[str, tuple[int, event_types.Metric]] = {}
        self.newest: event_types.Metric | None = None

    def append(self, metric: event_types.Metric) -> event_types.Metric:
        """Keep a value, and return it; the step of one without a step is its number, from 0."""
        number, special = self._came, self._special
        if metric.step is None:
            metric = structs.replace(metric, step=number)
        if number % self._every == 0:
            self._kept.append(metric)
        self._came += 1
        if math.isfinite(metric.value):
            special.pop("broken", None)
            if "lowest" not in special or metric.value < special["lowest"][1].value:
                special["lowest"] = number, metric
            if "highest" not in special or metric.value > special["highest"][1].value:
                special["highest"] = number, metric
        else:
            special.setdefault("broken", (number, metric))
            special["not finite"] = number, metric
        self.newest = metric
        if len(self._kept) > self._most:
            self._kept = self._kept[::2]
            self._every *= 2
        return metric

    def points(self) -> tuple[event_types.Metric, ...]:
        """The values that were kept, in their order; the lowest, the highest and the newest are always among them."""
        numbered = {index * self._every: metric for index, metric in enumerate(self._kept)}
        numbered.update(self._special.values())
        if self.newest is not None:
            numbered[self._came - 1] = self.newest
        return tuple(metric for _, metric in sorted(numbered.items(), key=itemgetter(0)))


# A loop that renames its bars each time has no end of them; these many are kept of a rank, those that move first.
_MOST_BARS = 20
# Shorter windows of steps say more about the moment than about the rank.
_WINDOW_STEPS, _WINDOW_SECONDS = 50, 5.0
_MOST_WINDOWS = 60


@dataclass(frozen=True, slots=True)
class RankSummary:
    """One rank at one moment, without what is long: `metrics` are the newest of each name, `progress` of each bar."""

    rank: int
    state: event_types.State
    detail: str
    line_count: int
    open_lines: tuple[event_types.LogLine, ...]
    metrics: dict[str, event_types.Metric]
    progress: dict[str, event_types.Progress]
    devices: dict[str, event_types.DeviceSample]
    coordinates: dict[str, int]
    knobs: dict[str, event_types.KnobValue]
    memory: event_types.MemoryUse | None
    # the parts of its first step's time, and of its newest steps'
    first_step: event_types.StepBreakdown | None
    steps: event_types.StepBreakdown | None
    # means over the newest windows of at least 50 steps and 5 seconds of steps, each up to its `step`
    windows: tuple[event_types.StepBreakdown, ...]
    requested_profile: event_types.ProfileRequested | None
    # the newest that it has sent, and one that it has not sent yet
    profile: event_types.StepProfile | None
    failure: event_types.Failure | None


def mean_steps(steps: Sequence[event_types.StepBreakdown], weights: Sequence[float]) -> event_types.StepBreakdown:
    """The mean of these steps, as the newest of them."""
    parts = ["data", "forward", "backward", "communication", "optimizer", "idle"]
    if all(step.preempted is not None for step in steps):
        parts.append("preempted")
    means: dict[str, Any] = {
        part: sum(weight * getattr(step, part) for step, weight in zip(steps, weights, strict=True)) / sum(weights)
        for part in parts
    }
    return structs.replace(steps[-1], **means)


@dataclass(frozen=True, slots=True)
class RankState(RankSummary):
    """One rank at one moment: `lines` are its last whole ones, `series` its metrics over time, thinned evenly."""

    lines: tuple[event_types.LogLine, ...]
    series: dict[str, tuple[event_types.Metric, ...]]


# What a summary has as the rank's state has it.
_SAME = (
    *("state", "detail", "coordinates", "knobs", "memory", "first_step", "steps", "requested_profile", "profile"),
    "failure",
)


@dataclass(slots=True)
class RankFold:
    """The state of one rank, made of its events so far."""

    lines: BoundedLog[event_types.LogLine]
    series: defaultdict[str, MetricSeries]
    state: event_types.State = "starting"
    detail: str = ""
    open_lines: dict[event_types.Stream, event_types.LogLine] = field(default_factory=dict)
    progress: dict[str, event_types.Progress] = field(default_factory=dict)
    devices: dict[str, event_types.DeviceSample] = field(default_factory=dict)
    coordinates: dict[str, int] = field(default_factory=dict)
    knobs: dict[str, event_types.KnobValue] = field(default_factory=dict)
    memory: event_types.MemoryUse | None = None
    first_step: event_types.StepBreakdown | None = None
    steps: event_types.StepBreakdown | None = None
    windows: deque[event_types.StepBreakdown] = field(default_factory=lambda: deque(maxlen=_MOST_WINDOWS))
    # the steps of the window that is not full yet, each with the number of steps that it is the mean of
    window: list[tuple[int, event_types.StepBreakdown]] = field(default_factory=list)
    requested_profile: event_types.ProfileRequested | None = None
    profile: event_types.StepProfile | None = None
    failure: event_types.Failure | None = None

    def take_state(self, change: event_types.StateChange) -> None:
        if change.state == "starting":  # also when it restarts: the end of the former one is over
            self.failure = self.first_step = self.steps = None
            self.windows.clear()
            self.window.clear()
            self.open_lines.clear()
            self.knobs = {}
            self.requested_profile = None
        self.state, self.detail = change.state, change.detail

    def take_fact(self, fact: event_types.RankFact) -> None:
        match fact:
            case event_types.Progress():
                self._take_progress(fact)
            case event_types.DeviceSample():
                self.devices[fact.device] = fact
            case event_types.MemoryUse():
                self.memory = fact
            case event_types.MeshCoordinates():
                self.coordinates = fact.coordinates
            case event_types.StepBreakdown():
                self._take_steps(fact)
            case event_types.ProfileRequested():
                self.requested_profile = fact
            case event_types.StepProfile():
                self.profile = fact
                if self.requested_profile is not None and self.requested_profile.number <= fact.number:
                    self.requested_profile = None
            case event_types.Failure():
                self.failure = fact

    def _take_steps(self, steps: event_types.StepBreakdown) -> None:
        if steps.step == 1:
            self.first_step = steps
            return
        before = self.steps or self.first_step
        self.steps = steps
        self.window.append((max(steps.step - (before.step if before is not None else 0), 1), steps))
        counts, means = zip(*self.window, strict=True)
        if sum(counts) >= _WINDOW_STEPS and sum(count * mean.total for count, mean in self.window) >= _WINDOW_SECONDS:
            self.windows.append(mean_steps(means, counts))
            self.window.clear()

    def _take_progress(self, progress: event_types.Progress) -> None:
        # in the order in which they began, those that have ended behind them: nested bars keep their order while they move
        name = progress.bar or progress.label
        before = self.progress.get(name)
        if progress.closed or (before is not None and before.closed):
            self.progress.pop(name, None)
        self.progress[name] = progress
        if len(self.progress) > _MOST_BARS:
            closed = (item for item, bar in self.progress.items() if bar.closed)
            del self.progress[next(closed, next(iter(self.progress)))]

    def summary(self, rank: int) -> dict[str, Any]:
        """The values of `RankSummary`."""
        return {
            **{name: getattr(self, name) for name in _SAME},
            "rank": rank,
            "line_count": self.lines.count,
            "open_lines": tuple(self.open_lines.values()),
            "metrics": {name: series.newest for name, series in self.series.items() if series.newest is not None},
            "progress": dict(self.progress),
            "devices": dict(self.devices),
            "windows": tuple(self.windows),
        }


def is_automatic(name: str) -> bool:
    """Whether a rank reports a metric of this name without being asked to."""
    return name == EPOCH or name.startswith(AUTOMATIC_PREFIXES)


def logged_names(names: Iterable[str]) -> list[str]:
    """The different names that code logged, in the order of their first coming."""
    return [name for name in dict.fromkeys(names) if not is_automatic(name)]


def in_order(names: Iterable[str]) -> list[str]:
    """The different names that have a curve: first what code logged, then what ranks report by themselves."""
    return sorted((name for name in dict.fromkeys(names) if name != EPOCH), key=is_automatic)


_MILLION = 1_000_000
# Of a run that restarts again and again, the newest restarts are kept.
_MOST_RESTARTS = 100
_MOST_KNOB_CHANGES = 100


class RunState:
    """The state that a run's events add up to: `apply` takes them in, everybody else only reads, from any thread."""

    # It is bounded, to some megabytes, whatever ranks do: the last `tail` lines of each rank, the last `backlog` lines and displays
    # of all, and about `points` values of each metric, spread evenly over the run.

    def __init__(self, size: int = 0, *, tail: int = 1000, backlog: int = 20_000, points: int = 1000) -> None:
        self._lock = Lock()
        self._tail = tail
        self._points = points
        self._ranks: dict[int, RankFold] = {rank: self._new_rank() for rank in range(size)}
        self._shown: BoundedLog[event_types.Shown] = BoundedLog(backlog, 32 * _MILLION)
        self._metrics: BoundedLog[event_types.Metric] = BoundedLog(backlog, backlog)
        # the state of the whole run, with the message that people were shown; its end in seconds since 1970
        self.state: event_types.State = "starting"
        self.detail = ""
        self.ended: float | None = None
        # the load of the machine at its last sample, and of each node by its number
        self.host: event_types.HostSample | None = None
        self._node_loads: dict[int, event_types.HostSample] = {}
        self._nodes: dict[int, event_types.NodeRanks] = {}
        # the warning about a run that is silent, and the positions of its ranks when its time was over
        self.idle_warning: event_types.IdleWarning | None = None
        self.hang: event_types.Hang | None = None
        # oldest first, of very many the newest; a change of a knob as the first rank made it
        self.restarts: tuple[event_types.Restart, ...] = ()
        self.knob_changes: tuple[event_types.KnobValue, ...] = ()
        # the mixed precision of the newest training; empty where it computes in that of its weights
        self.precision = ""
        # whether some rank has made an optimizer step in this attempt
        self.has_stepped = False
        # the numbers of whole lines, also those that are kept no longer, and of events that a run's folder has and nobody could read
        self.line_count = self.unread = 0
        # the number of events: a front end that has seen this many has nothing to draw
        self.changes = 0
        # each with its ranks
        self._slices: list[tuple[frozenset[int], RunState]] = []

    def apply(self, event: event_types.Event) -> None:
        """Take an event in; whatever a rank named or wrote is harmless from here on, but for lines, which keep their colours."""
        event = harmless(event)
        with self._lock:
            self.changes += 1
            match event:
                case event_types.LogLine():
                    self._take_line(event)
                case event_types.StateChange():
                    self._take_state(event)
                case event_types.Metric():
                    self._metrics.append(self._rank(event.rank).series[event.name].append(event), 1)
                case event_types.Display():
                    # a plot of plotly's is a dictionary; what is long, a picture, is a text, and is not written once more
                    texts = (value if isinstance(value, (str, bytes)) else repr(value) for value in event.data.values())
                    self._shown.append(event, sum(map(len, texts)))
                case event_types.KnobValue():
                    self._take_knob(event)
                case _ if isinstance(event, event_types.RankFact):
                    self._rank(event.rank).take_fact(event)
                case _:
                    self._take_of_run(event)
            # whoever made a slice says when it begins and ends
            if self._slices and not isinstance(event, event_types.StateChange):
                rank = getattr(event, "rank", None)
                for part in [part for ranks, part in self._slices if rank is None or rank in ranks]:
                    part.apply(event)

    def apply_lines(self, lines: Sequence[event_types.LogLine]) -> None:
        """Take lines in, which come by the thousand, at once."""
        with self._lock:
            self.changes += 1
            for line in lines:
                self._take_line(line)
            for ranks, part in self._slices:
                part.apply_lines([line for line in lines if line.rank in ranks])

    def slice(self, ranks: Iterable[int], cursor: int) -> RunState:
        """A state of its own for what these ranks do from now on, and put out after `cursor`, until `end_slice`."""
        # it has all ranks, whose states are the caller's to apply, and begins with the load of the machine and of their devices
        part, chosen = RunState(len(self._ranks)), frozenset(ranks)
        with self._lock:
            for item in self._shown.last(self._shown.count - cursor):
                if item.rank in chosen:
                    part.apply(item)
            for rank in chosen:
                part._rank(rank).devices.update(self._rank(rank).devices)
                part._rank(rank).open_lines.update(self._rank(rank).open_lines)
            part.host = self.host
            self._slices.append((chosen, part))
        return part

    def end_slice(self, part: RunState) -> int:
        """Have a slice take in no more; the cursor for what comes after its last output."""
        with self._lock:
            self._slices = [(ranks, other) for ranks, other in self._slices if other is not part]
            return self._shown.count

    def note_earlier(self, rank: int, lines: int) -> None:
        """So many lines of a rank came before those that are applied, and are kept no longer; for a run that is read back."""
        with self._lock:
            self._rank(rank).lines.count += lines
            self._shown.count += lines
            self.line_count += lines

    def replace_open_lines(self, lines: Iterable[event_types.LogLine]) -> None:
        """Have these open lines and no others; for a run that another process conducts."""
        with self._lock:
            for rank in self._ranks.values():
                rank.open_lines.clear()
            for line in lines:
                self._rank(line.rank).open_lines[line.stream] = line
            self.changes += 1

    def _take_line(self, line: event_types.LogLine) -> None:
        rank = self._ranks.get(line.rank) or self._rank(line.rank)
        if line.open:
            rank.open_lines[line.stream] = line
            return
        rank.open_lines.pop(line.stream, None)
        size = len(line.text)
        rank.lines.append(line, size)
        self._shown.append(line, size)
        self.line_count += 1

    def _take_state(self, change: event_types.StateChange) -> None:
        if change.rank is None:
            self.state, self.detail = change.state, change.detail
            self.ended = change.time if change.state in event_types.OVER else None
            self.idle_warning = None
        else:
            self._rank(change.rank).take_state(change)

    def _take_of_run(self, event: event_types.Event) -> None:
        """Take an event of all ranks in; one that says nothing of the run's state is passed over."""
        match event:
            case event_types.HostSample(node=None):
                self.host = event
            case event_types.HostSample(node=int(node)) if node in self._nodes:
                self._node_loads[node] = event
            case event_types.NodeRanks():
                self._nodes[event.node] = event
            case event_types.PrecisionChoice():
                self.precision = "" if event.name == "no" else event.name
            case event_types.FirstStep():
                self.has_stepped = True
            case event_types.Restart():
                self._take_restart(event)
            case event_types.IdleWarning():
                self.idle_warning = event if event.seconds else None
            case event_types.Hang():
                self.hang = event

    def _take_restart(self, restart: event_types.Restart) -> None:
        self.restarts = (*self.restarts, restart)[-_MOST_RESTARTS:]
        self.has_stepped = False
        self.idle_warning = None
        if restart.ranks is not None:
            # what former ranks wrote stays; the nodes come anew
            self._ranks = {rank: self._ranks.get(rank) or self._new_rank() for rank in range(restart.ranks)}
            self._nodes.clear()
            self._node_loads.clear()
        for rank in self._ranks.values():
            # bars of processes that are gone move no more
            rank.progress.clear()

    def _take_knob(self, knob: event_types.KnobValue) -> None:
        rank = self._rank(knob.rank)
        rank.knobs = {**rank.knobs, knob.name: knob}
        # all ranks make the same change: the first that says so counts
        known = {(change.name, change.step, change.value) for change in self.knob_changes}
        if knob.changed and (knob.name, knob.step, knob.value) not in known:
            self.knob_changes = (*self.knob_changes, knob)[-_MOST_KNOB_CHANGES:]

    def _rank(self, rank: int) -> RankFold:
        if rank not in self._ranks:
            self._ranks[rank] = self._new_rank()
        return self._ranks[rank]

    def _new_rank(self) -> RankFold:
        return RankFold(BoundedLog(self._tail, 4 * _MILLION), defaultdict(partial(MetricSeries, self._points)))

    # ------------------------------------------------------------------------------------------------------- reading

    @property
    def node_loads(self) -> dict[int, event_types.HostSample]:
        """The load of each node at its last sample, by the node's number."""
        with self._lock:
            return dict(self._node_loads)

    @property
    def nodes(self) -> tuple[event_types.NodeRanks, ...]:
        """The nodes of a run on several of them, in order; none of a run on this machine alone."""
        with self._lock:
            return tuple(node for _, node in sorted(self._nodes.items()))

    @property
    def ranks(self) -> tuple[int, ...]:
        with self._lock:
            return tuple(sorted(self._ranks))

    @property
    def failures(self) -> tuple[event_types.Failure, ...]:
        """One for each rank that failed, in the order of ranks."""
        with self._lock:
            return tuple(rank.failure for _, rank in sorted(self._ranks.items()) if rank.failure is not None)

    def since(self, cursor: int) -> NewItems[event_types.Shown]:
        """The output of ranks after `cursor`, over all ranks in the order in which it came; start with 0."""
        with self._lock:
            return self._shown.since(cursor)

    def metrics_since(self, cursor: int) -> NewItems[event_types.Metric]:
        """The metrics of all ranks after `cursor`, in the order in which they came; start with 0."""
        with self._lock:
            return self._metrics.since(cursor)

    def glances(self) -> tuple[RankSummary, ...]:
        """All ranks at this moment, in order, without their lines and series: cheap enough for ten times a second."""
        with self._lock:
            return tuple(RankSummary(**item.summary(rank)) for rank, item in sorted(self._ranks.items()))

    def knobs(self) -> dict[str, event_types.KnobValue]:
        """The knobs that ranks have declared, by name, with the value of the first rank that has it."""
        return {name: knob for glance in reversed(self.glances()) for name, knob in glance.knobs.items()}

    def open_lines(self) -> tuple[event_types.LogLine, ...]:
        """The lines that have not ended yet, such as progress bars, in the order of ranks."""
        with self._lock:
            return tuple(line for _, rank in sorted(self._ranks.items()) for line in rank.open_lines.values())

    def tail(self, rank: int, lines: int) -> tuple[event_types.LogLine, ...]:
        with self._lock:
            return self._ranks[rank].lines.last(lines) if rank in self._ranks else ()

    def line_count_of(self, rank: int) -> int:
        """The number of whole lines that a rank wrote so far."""
        with self._lock:
            return self._ranks[rank].lines.count if rank in self._ranks else 0

    def rank(self, rank: int) -> RankState:
        """Everything about a rank at this moment; a rank that is not known yet is one that has written nothing."""
        with self._lock:
            item = self._ranks.get(rank) or self._new_rank()
            series = {name: series.points() for name, series in item.series.items()}
            return RankState(**item.summary(rank), lines=item.lines.last(item.lines.count), series=series)


class RunInfo(Protocol):
    """A run that goes on or has ended, or what it left in its folder."""

    # the shown name of the function that runs
    @property
    def name(self) -> str: ...
    # the number of workers, what placed them, and why
    @property
    def why(self) -> str: ...
    # of every rank's output
    @property
    def folder(self) -> Path: ...
    # everything that has happened so far
    @property
    def view(self) -> RunState: ...
    # in seconds since 1970
    @property
    def started(self) -> float: ...
