"""Messages to a page about a run: the whole run once, then the changes, as plain JSON in numbered messages."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

from msgspec import structs

from accelerate_nb.events.model import (
    WIDGET_VIEW,
    DeviceSample,
    Display,
    Failure,
    Hang,
    HostSample,
    KnobValue,
    LogLine,
    MemoryUse,
    Metric,
    NodeRanks,
    ProfileRequested,
    Progress,
    Restart,
    StepBreakdown,
    StepProfile,
    Stream,
    cause,
)
from accelerate_nb.events.rank_state import RankSummary
from accelerate_nb.events.run_state import RunState, Shown
from accelerate_nb.events.terminal_lines import draws_a_bar
from accelerate_nb.failures.worker_error import hang_headline, other_failures
from accelerate_nb.reports.failure_summary import MOST_OTHERS, restart_line
from accelerate_nb.reports.step_causes import PHASES, step_causes
from accelerate_nb.reports.summary import RunFacts, coordinates_text, memory_parts, memory_text
from accelerate_nb.reports.text_format import first_within

Message: TypeAlias = dict[str, Any]
T = TypeVar("T")
_Profiles: TypeAlias = tuple[ProfileRequested | None, StepProfile | None]

_MOST_LINES = 2000  # in one message; a page draws no more in a tenth of a second
_MOST_CHARACTERS = 1_000_000  # of all lines of one message
_LONGEST_LINE = 20_000
_LONGEST_TEXT = 200_000  # a traceback
MOST_POINTS = 5000  # of all metrics of one message
_MOST_RESTARTS = 20


class MessageFeed:
    """
    Follows a run's view for one panel: `news()` holds the changes since the last call, `backlog()` everything.

    >>> feed = MessageFeed(view)
    >>> for message in feed.backlog(facts): send(message)
    >>> feed.news()  # None where nothing has changed
    """

    def __init__(self, view: RunState, clock: Callable[[], float] = time.time) -> None:
        self._view, self._clock = view, clock
        self.seq = 0
        self._forget()

    def _forget(self) -> None:
        self._lines = self._metrics = 0
        self._changes = -1
        self._state: Any = None
        self._ranks: dict[int, tuple[Any, ...]] = {}
        self._progress: dict[tuple[int, str], Progress] = {}
        self._devices: dict[tuple[int, str], DeviceSample] = {}
        self._coordinates: dict[int, dict[str, int]] = {}
        self._open: dict[tuple[int, Stream], LogLine] = {}
        self._restarts: tuple[Restart, ...] = ()
        self._nodes: tuple[NodeRanks, ...] = ()
        self._loads: dict[int, HostSample] = {}
        self._precision = ""
        self._knobs = KnobFeed(self._view)
        self._rank_facts = RankFactsFeed()
        self._steps: dict[int, StepBreakdown] = {}
        self._causes: tuple[str, ...] = ()
        self._failures: tuple[Failure, ...] = ()
        self._hang: Hang | None = None
        self._host: HostSample | None = None
        self._idle_warning: Any = None
        self._line_count = 0

    def numbered(self, message: Message) -> Message:
        """A message with the next number and the kernel's time."""
        self.seq += 1
        return {"seq": self.seq, "now": self._clock(), **message}

    def is_far_behind(self) -> bool:
        """Whether so much has come that `news()` would leave lines out that `backlog` still has."""
        return self._view.since(self._lines).cursor - self._lines > _MOST_LINES

    # ---------------------------------------------------------------------------------------------------- everything

    def backlog(self, facts: RunFacts) -> Iterator[Message]:
        """All that is kept of the run, in messages of bounded size; the first makes the page drop what it has."""
        self._forget()
        news = self._view.since(0)
        self._lines, skipped = news.cursor, news.skipped
        self._metrics = self._view.metrics_since(2**62).cursor
        first: Message = {"reset": True, "run": facts.message(), **self._small()}
        first["metrics"] = [*series_rows(self._view, MOST_POINTS)]
        first["moved"] = max((bar.time for bar in self._progress.values()), default=None)
        parts = [*_parts([*map(_row, _lines_of(news.shown))])]
        for number, lines in enumerate(parts or [[]]):
            yield self.numbered({**(first if number == 0 else {}), "lines": lines, "skipped": skipped})
            skipped = 0
        if rows := self._open_rows(self._view.glances(), set()):
            yield self.numbered({"lines": rows})

    # --------------------------------------------------------------------------------------------------- what is new

    def news(self) -> Message | None:
        """The changes since the last message, of bounded size; `None` where there are none."""
        if (changes := self._view.changes) == self._changes:
            return None
        self._changes = changes
        message = {**self._new_lines(), **self._small(), **self._new_metrics()}
        return self.numbered(message) if message else None

    def _new_lines(self) -> Message:
        news = self._view.since(self._lines)
        self._lines = news.cursor
        lines = [*_lines_of(news.shown)]
        kept = _newest([*map(_row, lines[-_MOST_LINES:])])
        closed = {(line.rank, line.stream) for line in lines}
        rows = kept + self._open_rows(self._view.glances(), closed)
        skipped = news.skipped + len(lines) - len(kept)
        return {**({"lines": rows} if rows else {}), **({"skipped": skipped} if skipped else {})}

    def _open_rows(self, glances: Sequence[RankSummary], closed: set[tuple[int, Stream]]) -> list[list[Any]]:
        """Lines that have not ended and that the page does not have so, but for drawn bars; it forgets those that were closed."""
        now = {
            (glance.rank, line.stream): line
            for glance in glances
            for line in glance.open_lines
            # the page has a bar of its own for it
            if not draws_a_bar(line, glance.progress.values())
        }
        known = {key: line for key, line in self._open.items() if key not in closed}
        self._open = now
        ended = ((*key, line) for key, line in known.items() if key not in now)
        gone = [[rank, _number(stream), "", line.time, 1] for rank, stream, line in ended]
        return gone + [_row(line) for key, line in now.items() if known.get(key) is not line]

    def _new_metrics(self) -> Message:
        news = self._view.metrics_since(self._metrics)
        self._metrics = news.cursor
        series: dict[tuple[str, int], list[Metric]] = {}
        for metric in news.metrics:
            series.setdefault((metric.name, metric.rank), []).append(metric)
        if not series:
            return {}
        most = max(MOST_POINTS // len(series), 2)
        rows = [[name, rank, [*map(_point, _thinned(all_, most))]] for (name, rank), all_ in series.items()]
        return {"metrics": rows}

    def _small(self) -> Message:
        """Whatever else has changed: states, bars, devices, the machine, failures."""
        restarts = self._new_restarts()
        glances = self._view.glances()
        found: Message = {
            "restarts": restarts,
            "nodes": self._new_nodes(),
            "loads": [*self._new_loads()],
            "state": self._new_state(),
            "precision": self._new_precision(),
            "ranks": [*self._new_ranks(glances)],
            "progress": [*self._new_progress(glances)],
            "devices": [*self._new_devices(glances)],
            "coordinates": [*self._new_coordinates(glances)],
            "steps": (steps := [*self._new_steps(glances)]),
            **self._rank_facts.news(glances),
            **self._knobs.news(),
            "host": self._new_host(),
        }
        message = {name: value for name, value in found.items() if value}
        if steps or "state" in message:
            causes = step_causes(glances, self._view.nodes, is_over=self._view.ended is not None)
            if causes != self._causes:
                self._causes = causes
                message["causes"] = [*causes]
        failures, hang = self._failures_of(glances), self._view.hang
        if (failures, hang) != (self._failures, self._hang):
            # a restarted rank has not failed any more
            self._failures, self._hang = failures, hang
            message["failure"] = hang_message(hang) if hang else failure_message(failures) if failures else None
        if self._view.line_count != self._line_count:
            self._line_count = message["line_count"] = self._view.line_count
        if self._view.idle_warning is not self._idle_warning:
            self._idle_warning = warning = self._view.idle_warning
            message["idle_warning"] = warning and {"seconds": warning.seconds, "text": warning.text}
        return message

    def _failures_of(self, glances: Sequence[RankSummary]) -> tuple[Failure, ...]:
        """The failures; the end of ranks that were stopped is none."""
        failures = tuple(glance.failure for glance in glances if glance.failure is not None)
        stopped = self._view.state in {"stopping", "stopped"}
        ends = (item.ended_by_us or (stopped and item.type == "KeyboardInterrupt") for item in failures)
        return () if all(ends) else failures

    def _new_state(self) -> Message | None:
        view = self._view
        now = (view.state, view.detail, view.ended)
        if now == self._state:
            return None
        self._state = now
        return {"state": view.state, "detail": view.detail, "ended": view.ended}

    def _new_restarts(self) -> list[list[Any]]:
        if (now := self._view.restarts) == self._restarts:
            return []
        self._restarts = now
        # the page drops the bars of processes that are gone
        self._progress.clear()
        return [
            [item.attempt, item.max_restarts, restart_line(item), *([] if item.ranks is None else [item.ranks])]
            for item in now[-_MOST_RESTARTS:]
        ]

    def _new_nodes(self) -> list[list[Any]]:
        if (now := self._view.nodes) == self._nodes:
            return []
        self._nodes = now
        return [[node.node, node.label, node.first, node.last] for node in now]

    def _new_loads(self) -> Iterator[list[Any]]:
        for node, sample in self._view.node_loads.items():
            if self._loads.get(node) is not sample:
                self._loads[node] = sample
                yield [node, _plain(sample.cpu), *sample.memory]

    def _new_precision(self) -> str | None:
        if (now := self._view.precision) == self._precision:
            return None
        self._precision = now
        return now or "no"

    def _new_ranks(self, glances: Sequence[RankSummary]) -> Iterator[list[Any]]:
        for glance in glances:
            # a number alone is that of the worker's process
            detail = f"process {glance.detail}" if glance.detail.isdecimal() else glance.detail
            now = (glance.state, detail, glance.line_count)
            if self._ranks.get(glance.rank) != now:
                self._ranks[glance.rank] = now
                yield [glance.rank, *now]

    def _new_progress(self, glances: Sequence[RankSummary]) -> Iterator[list[Any]]:
        bars = ((glance.rank, name, bar) for glance in glances for name, bar in glance.progress.items())
        for rank, name, bar in bars:
            if self._progress.get((rank, name)) is not bar:
                self._progress[rank, name] = bar
                numbers = map(_plain, (bar.done, bar.total, bar.rate))
                yield [rank, bar.label, *numbers, bar.unit, bar.closed, name, bar.note]

    def _new_devices(self, glances: Sequence[RankSummary]) -> Iterator[list[Any]]:
        samples = ((glance.rank, name, sample) for glance in glances for name, sample in glance.devices.items())
        for rank, name, sample in samples:
            if self._devices.get((rank, name)) is not sample:
                self._devices[rank, name] = sample
                yield [rank, name, _plain(sample.utilisation), sample.memory_used, sample.memory_total]

    def _new_coordinates(self, glances: Sequence[RankSummary]) -> Iterator[list[Any]]:
        for glance in glances:
            if glance.coordinates and self._coordinates.get(glance.rank) is not glance.coordinates:
                self._coordinates[glance.rank] = glance.coordinates
                yield [glance.rank, coordinates_text(glance.coordinates)]

    def _new_steps(self, glances: Sequence[RankSummary]) -> Iterator[list[Any]]:
        for glance in glances:
            steps = glance.steps or glance.first_step
            if steps is not None and self._steps.get(glance.rank) is not steps:
                self._steps[glance.rank] = steps
                yield [glance.rank, [round(getattr(steps, phase) * 1000, 3) for phase in PHASES]]

    def _new_host(self) -> list[list[Any]] | None:
        host = self._view.host
        if host is None or host is self._host:
            return None
        self._host = host
        sizes = {"memory": host.memory, "disk": host.disk, "shared memory": host.shared_memory}
        return [["cpu", _plain(host.cpu), 100, "%"], *([name, *size, "B"] for name, size in sizes.items() if size)]


class KnobFeed:
    """Follows the knobs of a run's view for one panel: `news()` holds the changes since the last call."""

    def __init__(self, view: RunState) -> None:
        self._view = view
        self._knobs: dict[str, KnobValue] = {}
        self._changes: tuple[KnobValue, ...] = ()

    def news(self) -> dict[str, list[Any]]:
        """`knobs` as name, value and bounds of those that are new, `knob_changes` as name, value and time of all; empty without news."""
        knobs, changes = self._view.knobs(), self._view.knob_changes
        new = [knob for name, knob in knobs.items() if self._knobs.get(name) is not knob]
        message: dict[str, list[Any]] = {}
        if new:
            message["knobs"] = [[knob.name, knob.value, knob.least, knob.most] for knob in new]
        if changes != self._changes:
            message["knob_changes"] = [[change.name, change.value, change.time] for change in changes]
        self._knobs, self._changes = knobs, changes
        return message


class RankFactsFeed:
    """Follows the memory and the profiles of ranks for one panel: `news()` holds the changes since the last call."""

    def __init__(self) -> None:
        self._memory: dict[int, MemoryUse] = {}
        self._profiles: dict[int, _Profiles] = {}

    def news(self, ranks: Sequence[RankSummary]) -> dict[str, list[Any]]:
        """
        `memory` as rank, bytes of each part (`MEMORY_PARTS`), those of the whole device or `None`, and all of it in words.

        `profiles` as rank, the steps of a profile that is under way or `None`, and the newest profile or `None`.
        """
        return {"memory": [*self._new_memory(ranks)], "profiles": [*self._new_profiles(ranks)]}

    def _new_memory(self, ranks: Sequence[RankSummary]) -> Iterator[list[Any]]:
        for rank in ranks:
            if rank.memory is not None and self._memory.get(rank.rank) is not rank.memory:
                self._memory[rank.rank] = rank.memory
                yield [rank.rank, [*memory_parts(rank.memory)], rank.memory.total, memory_text(rank.memory)]

    def _new_profiles(self, ranks: Sequence[RankSummary]) -> Iterator[list[Any]]:
        for rank in ranks:
            requested, profile = now = rank.requested_profile, rank.profile
            if self._profiles.get(rank.rank, (None, None)) != now:
                self._profiles[rank.rank] = now
                yield [rank.rank, requested and requested.steps, profile and structs.asdict(profile)]


def failure_message(failures: Sequence[Failure]) -> Message:
    """The failure that led to the others, and what became of those."""
    first = cause(failures)
    return {
        "rank": first.rank,
        "type": first.type,
        "message": first.message[:_LONGEST_TEXT],
        "advice": first.advice,
        "frames": [[*frame] for frame in first.frames],
        "traceback": first.traceback[-_LONGEST_TEXT:],
        "last_lines": [*first.last_lines],
        "others": other_failures(first, failures, MOST_OTHERS),
    }


def hang_message(hang: Hang) -> Message:
    """The timeout of the run, as a failure of no rank: the positions of the waiting ranks, and every stack."""
    message = f"{hang_headline(hang)}.\n{hang.text}"[:_LONGEST_TEXT]
    return {"rank": None, "type": "HangError", "message": message, "traceback": hang.stacks[-_LONGEST_TEXT:]}


def is_text(display: Display) -> bool:
    """Whether a page can show nothing of a display but its text."""
    return set(display.data) <= {"text/plain", WIDGET_VIEW}


def text_lines(display: Display) -> list[LogLine]:
    """The text of a display as lines of its rank."""
    text = str(display.data.get("text/plain", ""))
    return [LogLine(display.rank, "stdout", part, display.time) for part in text.splitlines()]


def _lines_of(shown: Sequence[Shown]) -> Iterator[LogLine]:
    """Lines, those of displays that are only text among them."""
    for item in shown:
        if isinstance(item, LogLine):
            yield item
        elif is_text(item):
            yield from text_lines(item)


def _row(line: LogLine) -> list[Any]:
    text, more = line.text, len(line.text) - _LONGEST_LINE
    if more > 0:
        text = f"{text[:_LONGEST_LINE]} ... ({more:,} more characters are in the run's folder)"
    return [line.rank, _number(line.stream), text, line.time, int(line.open), *([line.meaning] if line.meaning else [])]


def _number(stream: Stream) -> int:
    return 1 if stream == "stderr" else 0


def _newest(rows: list[list[Any]]) -> list[list[Any]]:
    """The last rows that fit into one message."""
    return first_within(reversed(rows), _MOST_CHARACTERS, lambda row: len(row[2]))[::-1]


def _parts(rows: list[list[Any]]) -> Iterator[list[list[Any]]]:
    """All rows, in portions of the size of a message."""
    part: list[list[Any]] = []
    size = 0
    for row in rows:
        if part and (len(part) == _MOST_LINES or size + len(row[2]) > _MOST_CHARACTERS):
            yield part
            part, size = [], 0
        part.append(row)
        size += len(row[2])
    if part:
        yield part


def series_rows(view: RunState, most: int) -> Iterator[list[Any]]:
    """Every metric of every rank, thinned so that all together have about `most` points."""
    found = [(name, rank, points) for rank in view.ranks for name, points in view.rank(rank).series.items()]
    share = max(most // max(len(found), 1), 50)
    for name, rank, points in found:
        yield [name, rank, [*map(_point, _thinned(points, share))]]


def _thinned(values: Sequence[T], most: int) -> Sequence[T]:
    """Some of the values, evenly, with the last."""
    every = math.ceil(len(values) / most)
    return values if every <= 1 else [*values[:-1:every], values[-1]]


def _point(metric: Metric) -> list[Any]:
    return [metric.step, _plain(metric.value), metric.time]


def _plain(number: float | None) -> float | str | None:
    """A number for JSON, which has neither NaN nor infinities."""
    if number is None or math.isfinite(number):
        return number
    return "nan" if math.isnan(number) else "inf" if number > 0 else "-inf"
