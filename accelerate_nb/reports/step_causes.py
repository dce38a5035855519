"""The parts of a step in words: where its time goes, and what makes it slow."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median_low, stdev

from accelerate_nb.events.event_types import NodeRanks, StepBreakdown
from accelerate_nb.events.rank_state import RankSummary, mean_steps
from accelerate_nb.reports.text_format import counted

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
    first = max(
        (rank.first_step for rank in ranks if rank.first_step is not None), key=lambda step: step.total, default=None
    )
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
    data, communication, idle = (
        min(_share(mine, phase) for mine in steps) for phase in ("data", "communication", "idle")
    )
    if data >= _DATA:
        workers = steps[0].workers
        known = "" if workers is None else f" (num_workers={workers})"
        advice = (
            "give the DataLoader more workers, or prepare less in it"
            if workers
            else "pass num_workers=4 to the DataLoader"
        )
        yield f"waiting for the loader {verb} {_percent(data)} of the step{known}: {advice}"
    if communication >= _COMMUNICATION and not explains_waiting:
        yield f"communication {verb} {_percent(communication)} of the step: accumulate gradients, or use a larger batch"
    if idle >= _IDLE:
        yield (
            f"the loop's own code {verb} {_percent(idle)} of the step: log, print and copy results every few steps only"
        )


def _own(steps: StepBreakdown) -> float:
    """What a step takes without the wait for others."""
    return steps.total - steps.communication


def _share(steps: StepBreakdown, phase: str) -> float:
    return float(getattr(steps, phase)) / steps.total if steps.total > 0 else 0.0


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
