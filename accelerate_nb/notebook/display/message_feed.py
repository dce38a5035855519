"""Messages to a page about a run: the whole run once, then the changes, as plain JSON in numbered messages."""

import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

from msgspec import structs

from accelerate_nb.events.event_types import WIDGET_VIEW, Display, Failure, Hang, LogLine, Metric, Shown, Stream, cause
from accelerate_nb.events.run_state import RankSummary, RunState
from accelerate_nb.events.terminal_lines import draws_a_bar
from accelerate_nb.failures.worker_error import hang_headline, other_failures
from accelerate_nb.reports.summary import (
    MOST_OTHERS,
    PHASES,
    RunFacts,
    coordinates_text,
    memory_parts,
    memory_text,
    restart_line,
    step_causes,
)
from accelerate_nb.reports.text_format import first_within

Message: TypeAlias = dict[str, Any]
T = TypeVar("T")

_MOST_LINES = 2000  # in one message; a page draws no more in a tenth of a second
_MOST_CHARACTERS = 1_000_000  # of all lines of one message
_LONGEST_LINE = 20_000
_LONGEST_TEXT = 200_000  # a traceback
MOST_POINTS = 5000  # of all metrics of one message
_MOST_RESTARTS = 20


class MessageFeed:
    """Follows a run's view for one panel: `news()` holds the changes since the last call, `backlog()` everything."""

    def __init__(self, view: RunState, clock: Callable[[], float] = time.time) -> None:
        self._view, self._clock = view, clock
        self.seq = 0
        self._forget()

    def _forget(self) -> None:
        self._lines = self._metrics = 0
        self._changes = -1
        self._open: dict[tuple[int, Stream], LogLine] = {}
        # what the page has, by its kind and what it is of
        self._known: dict[tuple[Hashable, ...], Any] = {}

    def _is_new(self, value: Any, *key: Hashable, at_first: Any = None) -> bool:
        """Whether the page does not have this value yet; from now on it has. `at_first` is what a page assumes."""
        former = self._known.get(key, at_first)
        if former is value or former == value:
            return False
        self._known[key] = value
        return True

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
        bars = (bar for glance in self._view.glances() for bar in glance.progress.values())
        first["moved"] = max((bar.time for bar in bars), default=None)
        parts = [*_parts([*map(_row, _lines_of(news.items))])]
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
        news = self._view.since(self._lines)
        self._lines = news.cursor
        lines = [*_lines_of(news.items)]
        newest = map(_row, reversed(lines[-_MOST_LINES:]))
        kept = first_within(newest, _MOST_CHARACTERS, lambda row: len(row[2]))[::-1]
        closed = {(line.rank, line.stream) for line in lines}
        rows = kept + self._open_rows(self._view.glances(), closed)
        message: Message = {"lines": rows, "skipped": news.skipped + len(lines) - len(kept)}
        message = {**{name: value for name, value in message.items() if value}, **self._small()}
        logged = self._view.metrics_since(self._metrics)
        self._metrics = logged.cursor
        series: dict[tuple[str, int], list[Metric]] = {}
        for metric in logged.items:
            series.setdefault((metric.name, metric.rank), []).append(metric)
        if series:
            most = max(MOST_POINTS // len(series), 2)
            message["metrics"] = [
                [name, rank, [*map(_point, _thinned(values, most))]] for (name, rank), values in series.items()
            ]
        return self.numbered(message) if message else None

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
        gone = [[rank, int(stream == "stderr"), "", line.time, 1] for rank, stream, line in ended]
        return gone + [_row(line) for key, line in now.items() if known.get(key) is not line]

    def _small(self) -> Message:
        """Whatever else has changed: states, bars, devices, the machine, failures."""
        view, glances = self._view, self._view.glances()
        knobs = (knob for name, knob in view.knobs().items() if self._is_new(knob, "knob", name))
        rows = [[knob.name, knob.value, knob.least, knob.most] for knob in knobs]
        found = {**self._of_run(), **self._of_ranks(glances), "knobs": rows}
        message = {name: value for name, value in found.items() if value}
        if "steps" in message or "state" in message:
            causes = step_causes(glances, view.nodes, is_over=view.ended is not None)
            if self._is_new(causes, "causes", at_first=()):
                message["causes"] = [*causes]
        failures, hang = self._failures_of(glances), view.hang
        if self._is_new((failures, hang), "failure", at_first=((), None)):
            # a restarted rank has not failed any more
            message["failure"] = hang_message(hang) if hang else failure_message(failures) if failures else None
        if self._is_new(warning := view.idle_warning, "idle_warning"):
            message["idle_warning"] = warning and {"seconds": warning.seconds, "text": warning.text}
        return message

    def _failures_of(self, glances: Sequence[RankSummary]) -> tuple[Failure, ...]:
        """The failures; the end of ranks that were stopped is none."""
        failures = tuple(glance.failure for glance in glances if glance.failure is not None)
        stopped = self._view.state in {"stopping", "stopped"}
        ends = (item.ended_by_us or (stopped and item.type == "KeyboardInterrupt") for item in failures)
        return () if all(ends) else failures

    def _of_run(self) -> Message:
        view, found = self._view, Message()
        if self._is_new(view.restarts, "restarts", at_first=()):
            # the page drops the bars of processes that are gone
            self._known = {key: value for key, value in self._known.items() if key[0] != "bar"}
            found["restarts"] = [
                [item.attempt, item.max_restarts, restart_line(item), *([] if item.ranks is None else [item.ranks])]
                for item in view.restarts[-_MOST_RESTARTS:]
            ]
        if self._is_new(view.nodes, "nodes", at_first=()):
            found["nodes"] = [[node.node, node.label, node.first, node.last] for node in view.nodes]
        loads = ((node, load) for node, load in view.node_loads.items() if self._is_new(load, "load", node))
        found["loads"] = [[node, _plain(load.cpu), *load.memory] for node, load in loads]
        if self._is_new((view.state, view.detail, view.ended), "state"):
            found["state"] = {"state": view.state, "detail": view.detail, "ended": view.ended}
        if self._is_new(view.precision, "precision", at_first=""):
            found["precision"] = view.precision or "no"
        if self._is_new(host := view.host, "host") and host is not None:
            sizes = {"memory": host.memory, "disk": host.disk, "shared memory": host.shared_memory}
            rows = ([name, *size, "B"] for name, size in sizes.items() if size)
            found["host"] = [["cpu", _plain(host.cpu), 100, "%"], *rows]
        if self._is_new(view.line_count, "line_count", at_first=0):
            found["line_count"] = view.line_count
        if self._is_new(view.knob_changes, "knob_changes", at_first=()):
            found["knob_changes"] = [[change.name, change.value, change.time] for change in view.knob_changes]
        return found

    def _of_ranks(self, glances: Sequence[RankSummary]) -> dict[str, list[list[Any]]]:
        """The changes of ranks, a row for each, which begins with the rank."""
        # steps: milliseconds of each part (`PHASES`); memory: bytes of each (`MEMORY_PARTS`), of the whole device, and in words
        kinds = ("ranks", "progress", "devices", "coordinates", "steps", "memory", "profiles")
        found: dict[str, list[list[Any]]] = {kind: [] for kind in kinds}
        for glance in glances:
            rank, new = glance.rank, self._is_new
            # a number alone is that of the worker's process
            detail = f"process {glance.detail}" if glance.detail.isdecimal() else glance.detail
            if new(state := (glance.state, detail, glance.line_count), "rank", rank):
                found["ranks"].append([rank, *state])
            for name, bar in glance.progress.items():
                if new(bar, "bar", rank, name):
                    sizes = map(_plain, (bar.done, bar.total, bar.rate))
                    found["progress"].append([rank, bar.label, *sizes, bar.unit, bar.closed, name, bar.note])
            samples = (item for item in glance.devices.items() if new(item[1], "device", rank, item[0]))
            found["devices"] += [
                [rank, name, _plain(sample.utilisation), sample.memory_used, sample.memory_total]
                for name, sample in samples
            ]
            if new(places := glance.coordinates, "coordinates", rank, at_first={}) and places:
                found["coordinates"].append([rank, coordinates_text(places)])
            if new(steps := glance.steps or glance.first_step, "steps", rank) and steps is not None:
                found["steps"].append([rank, [round(getattr(steps, phase) * 1000, 3) for phase in PHASES]])
            if new(memory := glance.memory, "memory", rank) and memory is not None:
                found["memory"].append([rank, [*memory_parts(memory)], memory.total, memory_text(memory)])
            requested, profile = glance.requested_profile, glance.profile
            if new((requested, profile), "profile", rank, at_first=(None, None)):
                found["profiles"].append([rank, requested and requested.steps, profile and structs.asdict(profile)])
        return found


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


def _lines_of(shown: Sequence[Shown]) -> Iterator[LogLine]:
    """Lines, those of displays that are only text among them."""
    for item in shown:
        if isinstance(item, LogLine):
            yield item
        elif is_text(item):
            text = str(item.data.get("text/plain", ""))
            yield from (LogLine(item.rank, "stdout", part, item.time) for part in text.splitlines())


def _row(line: LogLine) -> list[Any]:
    text, more = line.text, len(line.text) - _LONGEST_LINE
    if more > 0:
        text = f"{text[:_LONGEST_LINE]} ... ({more:,} more characters are in the run's folder)"
    is_error = int(line.stream == "stderr")
    return [line.rank, is_error, text, line.time, int(line.open), *([line.meaning] if line.meaning else [])]


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
