"""The state of a run, made of its events: the one object that front ends read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Protocol

from accelerate_nb.events import event_types
from accelerate_nb.events.event_codec import harmless
from accelerate_nb.events.rank_state import BoundedLog, MetricSeries, NewItems, RankFold, RankState, RankSummary

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
