"""The state of one rank, made of its events: its newest lines, and the values of its metrics, thinned evenly, with their names in order."""

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from typing import Any, Generic, TypeVar

from msgspec import structs

from accelerate_nb.events import event_types

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
