"""A run's facts in words: its name, state, progress, causes and memory; and its failure in the parts that a person reads."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean, median_low, stdev
from typing import Any, TypeVar

from accelerate_nb.events.event_types import (
    DeviceSample,
    Failure,
    Frame,
    Hang,
    MemoryUse,
    NodeRanks,
    Progress,
    Restart,
    StepBreakdown,
    StepProfile,
    cause,
)
from accelerate_nb.events.run_folder import shown_path
from accelerate_nb.events.run_reader import default_name, differing_arguments, kept_runs
from accelerate_nb.events.run_state import RankState, RankSummary, RunInfo, RunState, mean_steps
from accelerate_nb.events.terminal_lines import plain, plain_name
from accelerate_nb.failures.worker_error import failure_line, hang_headline, other_failures
from accelerate_nb.reports.metric_curves import MetricCurve, sparkline
from accelerate_nb.reports.text_format import (
    bytes_text,
    counted,
    narrowed,
    ranks_text,
    shortened,
    time_text,
    value_text,
)

# The parts in the order of strips; what a device can't tell is 0.
MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "others")
# Of a device, a part that its allocator can't use for whole blocks.
_USABLE = 0.98
# With fewer activations than these of the peak, nothing can be said of larger batches.
_LEAST_ACTIVATIONS = 0.05
_LARGEST_FACTOR = 8.0


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts that do not change while a run is shown; `host` and what follows are for a page that shows it live."""

    name: str
    why: str
    folder: str
    started: float
    size: int
    host: str = "jupyter"
    background: bool = False
    can_act: bool = True
    tags: tuple[str, ...] = ()
    # the call that shows a detached run again
    attach: str = ""

    @classmethod
    def of(cls, run: RunInfo, host: str, *, background: bool, can_act: bool) -> RunFacts:
        """The facts of a run; one without a name of its own has its function's, with the arguments in which earlier runs of it differ."""
        name, arguments = run.name, getattr(run, "arguments", None)
        if arguments and name == getattr(run, "function", ""):
            others = (saved.arguments for saved in kept_runs(run.folder.parent) if saved.function == name)
            name = default_name(name, arguments, differing_arguments([arguments, *others]))
        return cls(
            name=plain_name(name),
            why=plain(run.why),
            folder=shown_path(run.folder),
            started=run.started,
            size=len(run.view.ranks),
            host=host,
            background=background,
            can_act=can_act,
            tags=tuple(getattr(run, "tags", ())),
            attach=f'accelerate_nb.attach("{shown_path(run.folder)}")' if getattr(run, "is_detached", False) else "",
        )

    def message(self) -> dict[str, Any]:
        """The facts as a page reads them."""
        return {name: getattr(self, name) for name in self.__slots__}


def memory_parts(memory: MemoryUse) -> tuple[int, ...]:
    """The bytes of each of `MEMORY_PARTS`."""
    # Activations, which are measured on GPUs alone, are what the allocator's peak held beside the first three; others are what the
    # device, or on a CPU the process, has in use beside all that: caches, libraries, other processes.
    held = memory.weights + memory.gradients + memory.optimizer
    activations = 0 if memory.peak is None else max(memory.peak - held, 0)
    others = 0 if memory.used is None else max(memory.used - held - activations, 0)
    return memory.weights, memory.gradients, memory.optimizer, activations, others


def batch_factor(memory: MemoryUse) -> float | None:
    """How many times the batch would fit, in tenths, if activations grow with it; `None` where that is unknown or hardly more."""
    *_, activations, others = memory_parts(memory)
    if memory.total is None or memory.peak is None or activations <= _LEAST_ACTIVATIONS * memory.peak:
        return None
    fixed = memory.peak - activations + others
    factor = math.floor(10 * (_USABLE * memory.total - fixed) / activations) / 10
    return min(factor, _LARGEST_FACTOR) if factor >= 1.1 else None


def memory_text(memory: MemoryUse) -> str:
    """A rank's memory in words, with the peak and what would fit."""
    *_, activations, others = memory_parts(memory)
    names = ("weights", "gradients", "optimizer")
    parts = ", ".join(f"{bytes_text(getattr(memory, name))} of {name}" for name in names)
    if memory.peak is None:
        whole = "" if memory.used is None else f"; the process takes {bytes_text(memory.used)} in all"
        return f"holds {parts}{whole}"
    if memory.used is None:
        return f"holds {parts}; peak {bytes_text(memory.peak)}"
    factor = batch_factor(memory)
    fits = "" if factor is None else f": a batch of about {factor:.1f} × would fit"
    more = f"{bytes_text(activations)} of activations, {bytes_text(others)} of others"
    return f"holds {parts}, {more}; peak {bytes_text(memory.peak + others, memory.total)}{fits}"


AnyRank = TypeVar("AnyRank", bound=RankSummary)

# More ranks than this are shown in groups of one state.
MOST_ROWS = 16
_MOST_BARS = 2
_BAR = 12
_WIDEST_OPERATION, _MOST_OPERATIONS = 80, 3
SIGNS = {"starting": "○", "running": "●", "stopping": "◌", "finished": "✔", "failed": "✖", "stopped": "■"}


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """One rank, or several of a node in the same state; `values` are those of the table's metrics, empty where there is none."""

    ranks: str
    state: str
    progress: tuple[str, ...]
    values: tuple[str, ...]
    devices: tuple[str, ...]
    steps: str = ""
    # the label of their node, in a run on several
    node: str = ""


def unread_text(view: RunState) -> tuple[str, ...]:
    """The number of events that could not be read back, as a fact of a run, where there are any."""
    return (f"{counted(view.unread, 'event')} of its folder can't be read",) if view.unread else ()


def curve_text(curve: MetricCurve) -> tuple[str, ...]:
    """A curve in a line of text, each number with its name."""
    name, course, low, high, newest, more = curve_cells(curve)
    return name, course, f"min {low}" if low else "", f"max {high}" if high else "", f"last {newest}", more


def curve_cells(curve: MetricCurve) -> tuple[str, str, str, str, str, str]:
    """A curve in a line of a table: its name, its course, its lowest, highest and newest value, and how far it is."""
    newest = f"{value_text(curve.newest)} {curve.how}".rstrip()
    low, high = (value_text(curve.low), value_text(curve.high)) if curve.whole else ("", "")
    step = f"step {curve.last_step:,}" if curve.last_step else ""
    course = sparkline([bin_.mean for bin_ in curve.whole]) if curve.points > 1 else ""
    more = ", ".join(filter(None, (step, curve.not_finite)))
    return narrowed(plain(curve.name), 60), course, low, high, newest, more


def bar_text(bar: Progress, *, moves: bool = True) -> str:
    """A progress bar as text, with the time that is left: `train ██████░░░░░░ 30/60 10 it/s 00:03`."""
    done = f"{value_text(bar.done)}/{value_text(bar.total)}" if bar.total else f"{value_text(bar.done)} {bar.unit}"
    filled = round(_BAR * min(max(bar.done / bar.total, 0), 1)) if bar.total else 0
    drawn = "█" * filled + "░" * (_BAR - filled) if bar.total else ""
    rate = f"{value_text(bar.rate)} {bar.unit}/s" if bar.rate else ""
    left = time_text((bar.total - bar.done) / bar.rate) if moves and bar.rate and bar.total and not bar.closed else ""
    label, note = (narrowed(plain(text), 60) for text in (bar.label, bar.note))
    return " ".join(filter(None, (label, drawn, done, plain(rate), left, note)))


# ----------------------------------------------------------------------------------------------------------------- rows


def shown_alone(ranks: Sequence[RankState]) -> list[RankState]:
    """The ranks that are shown one by one: all of them, or of many the first, those that failed, and the last."""
    if len(ranks) <= MOST_ROWS:
        return list(ranks)
    failed = [rank for rank in ranks if rank.failure is not None and not rank.failure.ended_by_us]
    chosen = {rank.rank: rank for rank in (ranks[0], *failed[: MOST_ROWS - 2], ranks[-1])}
    return [chosen[rank] for rank in sorted(chosen)]


def rows_of(ranks: Sequence[RankState], columns: Sequence[str], nodes: Sequence[NodeRanks]) -> Iterator[SummaryRow]:
    """The rows of a table of all ranks, by node: those that are shown alone, and the others in groups of a state."""
    known = {rank.rank for rank in shown_alone(ranks)}
    for node, members in ranks_of_nodes(ranks, nodes):
        yield from (row_of([rank], columns, node) for rank in members if rank.rank in known)
        rest = sorted((rank for rank in members if rank.rank not in known), key=lambda rank: rank.state)
        for _, group in groupby(rest, key=lambda rank: rank.state):
            yield row_of(list(group), columns, node)


def ranks_of_nodes(ranks: Sequence[AnyRank], nodes: Sequence[NodeRanks]) -> Iterator[tuple[str, list[AnyRank]]]:
    """The label of each node with its ranks, in order; all ranks under an empty label where there are not several nodes."""
    if len(nodes) < 2:
        yield "", list(ranks)
        return
    for node in nodes:
        yield narrowed(plain(node.label), 60), [rank for rank in ranks if node.first <= rank.rank <= node.last]


def row_of(ranks: Sequence[RankSummary], columns: Sequence[str], node: str = "") -> SummaryRow:
    """A table's row for one rank, or for several in the same state together."""
    steps = [rank.steps for rank in ranks if rank.steps is not None]
    return SummaryRow(
        ranks=ranks_text([rank.rank for rank in ranks]),
        state=ranks[0].state,
        progress=(*_progress(ranks),),
        values=tuple(_value(ranks, name) for name in columns),
        devices=(*_devices(ranks),),
        # those of the rank that has the longest
        steps=step_text(max(steps, key=lambda step: step.total - step.communication)) if steps else "",
        node=node,
    )


def _progress(ranks: Sequence[RankSummary]) -> Iterator[str]:
    """Of a rank the newest bars that still move, or else the one that moved last; of several ranks the slowest."""
    moves = ranks[0].state in {"running", "stopping"}
    shown: list[list[Progress]] = []
    for rank in ranks:
        bars = list(rank.progress.values())
        shown.append([bar for bar in bars if not bar.closed][-_MOST_BARS:] or bars[-1:])
    if len(ranks) == 1:
        yield from (bar_text(bar, moves=moves) for bar in shown[0])
    elif last := [bars[-1] for bars in shown if bars]:
        slowest = min(last, key=lambda bar: bar.done)
        yield f"{bar_text(slowest, moves=moves)} (the slowest of {len(last)})"


def _value(ranks: Sequence[RankSummary], name: str) -> str:
    values = [rank.metrics[name].value for rank in ranks if name in rank.metrics]
    if not values:
        return ""
    mean = sum(value / len(values) for value in values)
    return value_text(mean) if len(values) == 1 else f"{value_text(mean)} mean of {len(values)}"


def _devices(ranks: Sequence[RankSummary]) -> Iterator[str]:
    samples = [sample for rank in ranks for sample in rank.devices.values()]
    if len(ranks) == 1:
        if ranks[0].coordinates:
            yield coordinates_text(ranks[0].coordinates)
        yield from map(device_text, samples)
        if ranks[0].memory is not None:
            yield memory_text(ranks[0].memory)
    elif busy := [sample.utilisation for sample in samples if sample.utilisation is not None]:
        yield f"{counted(len(samples), 'device')}, {sum(busy) / len(busy):.0f}% busy"


def coordinates_text(coordinates: Mapping[str, int]) -> str:
    """The place of a rank in a mesh: `dp_shard 1 tp 0`."""
    return " ".join(f"{narrowed(plain(axis), 20)} {index}" for axis, index in coordinates.items())


def device_text(sample: DeviceSample) -> str:
    """A device's load and memory: `cuda:0 87% 51.2/74.5 GiB`."""
    busy = f"{sample.utilisation:.0f}%" if sample.utilisation is not None else ""
    memory = bytes_text(sample.memory_used, sample.memory_total) if sample.memory_used is not None else ""
    return " ".join(filter(None, (narrowed(plain(sample.device), 40), busy, memory)))


# --------------------------------------------------------------------------------------------------------------------- profile


def newest_profile(ranks: Sequence[RankSummary]) -> tuple[StepProfile, tuple[int, ...]] | None:
    """The newest profile of the first rank that has one, and all ranks that have it; `None` where no rank was profiled."""
    profiles = [rank.profile for rank in ranks if rank.profile is not None]
    if not profiles:
        return None
    number = max(profile.number for profile in profiles)
    # one with a table before those without
    newest = sorted((item for item in profiles if item.number == number), key=lambda item: bool(item.problem))
    return newest[0], tuple(sorted(item.rank for item in newest))


def profile_head(profile: StepProfile) -> str:
    """A profile in a line: `rank 0, profile of 10 steps: 52 ms a step, costliest operations on the CPU`."""
    if profile.problem:
        return f"rank {profile.rank} was not profiled: {narrowed(plain(profile.problem), 300)}"
    device = profile.operations[0].device.upper() if profile.operations else "CPU"
    each = milliseconds(profile.seconds / max(profile.steps, 1))
    steps = counted(profile.steps, "step")
    return f"rank {profile.rank}, profile of {steps}: {each} a step, costliest operations on the {device}"


def profile_line(profile: StepProfile) -> str:
    """A profile's head with its first operations."""
    first = profile.operations[:_MOST_OPERATIONS]
    shares = ", ".join(f"{narrowed(plain(item.name), _WIDEST_OPERATION)} {item.share:.0%}" for item in first)
    return " · ".join(filter(None, (profile_head(profile), shares, profile.trace and f"trace: {profile.trace}")))


def milliseconds(seconds: float) -> str:
    """A short time in its unit: `52.3 ms`, `2.5 s`."""
    return f"{value_text(float(f'{seconds:.3g}'))} s" if seconds >= 1 else f"{float(f'{seconds * 1e3:.3g}'):g} ms"


def profile_row(operation: tuple[str, int, float, float, str]) -> tuple[str, str, str, str]:
    """An operation in a table: its name, its calls, the seconds in itself, and their share."""
    name, calls, seconds, share, _ = operation
    return narrowed(plain(name), _WIDEST_OPERATION), f"{calls:,}", milliseconds(seconds), f"{share:.1%}"


# ------------------------------------------------------------------------------------------------ what makes steps slow

# The phases of a step, with what a sentence says of each.
PHASES: Mapping[str, str] = {
    "data": "waiting for its loader",
    "forward": "its forward",
    "backward": "its backward",
    "communication": "waiting for other ranks",
    "optimizer": "its optimizer",
    "idle": "the loop's own code",
}
# From these shares of a step on, something is worth a sentence.
_SLOWER = 0.15
# Of that part of its step a rank waits for a core where ranks disturb each other.
_PREEMPTED = 0.2
# So many windows say something, more where the system does not count what ranks wait for a core; a slow rank leads in that part of them.
_WINDOWS, _UNCOUNTED_WINDOWS, _LEADING = 4, 6, 0.8
_DATA, _COMMUNICATION, _IDLE = 0.25, 0.3, 0.3
# A first step that takes so many seconds, and so many times as long as the others, is explained.
_FIRST_STEP, _TIMES = 3.0, 10.0


def step_causes(
    ranks: Sequence[RankSummary], nodes: Sequence[NodeRanks] = (), *, is_over: bool = False
) -> tuple[str, ...]:
    """What makes the steps of a run slow, each in a sentence with what to do about it; nothing where they are as they should be."""
    # A slow rank keeps the others waiting: communication is judged by the rank that waits least. A rank is slow where it leads over
    # most windows, by more than windows differ from each other by chance; ranks that share busy cores disturb each other.
    verb = "was" if is_over else "is"
    steps = {
        rank.rank: mean_steps(rank.windows, [1.0] * len(rank.windows)) if rank.windows else rank.steps
        for rank in ranks
        if rank.steps is not None and rank.steps.total > 0 and rank.steps.step > 2
    }
    slow = [*_slow_rank(ranks, verb)]
    disturbed = [] if slow else [*_disturbed(steps, nodes, "disturbed" if is_over else "disturb")]
    of_all = _of_all(list(steps.values()), verb, explains_waiting=bool(disturbed))
    return (*_first_step(ranks), *slow, *disturbed, *of_all)


def step_text(steps: StepBreakdown) -> str:
    """The parts of a step, the longest first: `12.0 ms: data 62 %, forward 38 %`."""
    found = sorted(PHASES, key=lambda phase: -_share(steps, phase))
    parts = [f"{phase} {_percent(_share(steps, phase))}" for phase in found if _share(steps, phase) >= 0.005]
    return f"{time_of(steps.total)}: {', '.join(parts)}"


def time_of(seconds: float) -> str:
    """A step's time with three digits: 12.3 ms, 4.56 s."""
    value, unit = (seconds, "s") if seconds >= 1 else (seconds * 1000, "ms")
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def _first_step(ranks: Sequence[RankSummary]) -> Iterator[str]:
    firsts = [rank.first_step for rank in ranks if rank.first_step is not None]
    first = max(firsts, key=lambda step: step.total, default=None)
    usual = max((rank.steps.total for rank in ranks if rank.steps is not None), default=0.0)
    if first is None or first.total < max(_FIRST_STEP, _TIMES * usual):
        return
    if first.compiled:
        yield f"first step {time_of(first.total)}: compiling"
    elif _share(first, "data") > 0.5:
        workers = "" if first.workers is None else f" (num_workers={first.workers})"
        yield f"first step {time_of(first.total)}: its loader took {time_of(first.data)} to begin{workers}"


def _slow_rank(ranks: Sequence[RankSummary], verb: str) -> Iterator[str]:
    """A sentence on the rank that the others wait for."""
    windows = [*_common_windows([rank for rank in ranks if rank.windows])]
    is_counted = all(steps.preempted is not None for window in windows for steps in window.values())
    if len(windows) < (_WINDOWS if is_counted else _UNCOUNTED_WINDOWS):
        return
    (rank, led), *_ = Counter(max(window, key=lambda rank: _own(window[rank])) for window in windows).most_common(1)
    ((phase, most),) = Counter(_longer_phase(window, rank) for window in windows).most_common(1)
    slower = [_slower(window, rank) for window in windows]
    mean = fmean(slower)
    # Student's t: equal ranks come so far apart by chance once in thousands of runs
    by_chance = stdev(slower) * (4.5 + 20 / (len(slower) - 2)) / len(slower) ** 0.5
    if led < _LEADING * len(windows) or most <= len(windows) / 2 or mean < max(_SLOWER, by_chance):
        return
    mine = mean_steps([window[rank] for window in windows], [1.0] * len(windows))
    workers = f" (num_workers={mine.workers})" if phase == "data" and mine.workers is not None else ""
    how = f"{_percent(mean)} slower" if mean < 2 else f"{mean + 1:.1f} × as slow"
    yield f"rank {rank} {verb} {how}: {_percent(_share(mine, phase))} of its step {verb} {PHASES[phase]}{workers}"


def _common_windows(ranks: Sequence[RankSummary]) -> Iterator[Mapping[int, StepBreakdown]]:
    """The windows of the first rank, each with those of the others that end nearest to the same step."""
    ends = {rank.rank: [window.step for window in rank.windows] for rank in ranks}
    for window in ranks[0].windows if len(ranks) > 1 else ():
        found = {}
        for rank in ranks:
            at = bisect_left(ends[rank.rank], window.step)
            near = rank.windows[max(at - 1, 0) : at + 1]
            found[rank.rank] = min(near, key=lambda other: abs(other.step - window.step))
        yield found


def _slower(window: Mapping[int, StepBreakdown], rank: int) -> float:
    """How much slower a rank is than is usual, as a part of that: also without what each of them waited for a core."""
    usual = median_low(map(_own, window.values()))
    running = {other: _own(steps) - (steps.preempted or 0.0) for other, steps in window.items()}
    longer = min(_own(window[rank]) - usual, running[rank] - median_low(running.values()))
    return longer / max(usual, 1e-9)


def _longer_phase(window: Mapping[int, StepBreakdown], rank: int) -> str:
    phases = [phase for phase in PHASES if phase != "communication"]
    usual = {phase: median_low(getattr(steps, phase) for steps in window.values()) for phase in phases}
    return max(phases, key=lambda phase: getattr(window[rank], phase) - usual[phase])


def _disturbed(steps: Mapping[int, StepBreakdown], nodes: Sequence[NodeRanks], verb: str) -> Iterator[str]:
    """Whether ranks wait for a core of their machine."""
    share = {rank: (mine.preempted or 0.0) / mine.total for rank, mine in steps.items()}
    if len(steps) < 2 or max(share.values()) < _PREEMPTED:
        return
    rank = max(share, key=share.__getitem__)
    beside = next(([*range(node.first, node.last + 1)] for node in nodes if node.first <= rank <= node.last), [*steps])
    yield f"ranks {verb} each other: {counted(len(beside), 'rank')} on {counted(steps[rank].cores or 0, 'busy core')}"


def _of_all(steps: Sequence[StepBreakdown], verb: str, *, explains_waiting: bool) -> Iterator[str]:
    """What is much of every rank's step."""
    if not steps:
        return
    phases = ("data", "communication", "idle")
    data, communication, idle = (min(_share(mine, phase) for mine in steps) for phase in phases)
    if data >= _DATA:
        workers = steps[0].workers
        known = "" if workers is None else f" (num_workers={workers})"
        advice = "pass num_workers=4 to the DataLoader"
        if workers:
            advice = "give the DataLoader more workers, or prepare less in it"
        yield f"waiting for the loader {verb} {_percent(data)} of the step{known}: {advice}"
    if communication >= _COMMUNICATION and not explains_waiting:
        yield f"communication {verb} {_percent(communication)} of the step: accumulate gradients, or use a larger batch"
    if idle >= _IDLE:
        advice = "log, print and copy results every few steps only"
        yield f"the loop's own code {verb} {_percent(idle)} of the step: {advice}"


def _own(steps: StepBreakdown) -> float:
    """What a step takes without the wait for others."""
    return steps.total - steps.communication


def _share(steps: StepBreakdown, phase: str) -> float:
    return float(getattr(steps, phase)) / steps.total if steps.total > 0 else 0.0


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


# ------------------------------------------------------------------------------------------------------------- failures

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
