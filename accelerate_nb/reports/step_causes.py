"""The parts of a step in words: where its time goes, and what makes it slow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from accelerate_nb.events.model import StepBreakdown
from accelerate_nb.events.rank_state import RankSummary

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
_SLOWER = 0.2
# A rank that is less than this slower, in seconds, is only somewhat disturbed.
_DISTURBED = 0.002
_DATA, _COMMUNICATION, _IDLE = 0.25, 0.3, 0.3
# A first step that takes so many seconds, and so many times as long as the others, is explained.
_FIRST_STEP, _TIMES = 3.0, 10.0


def step_causes(ranks: Sequence[RankSummary]) -> tuple[str, ...]:
    """
    What makes the steps of a run slow, each in a sentence with what to do about it; nothing where they are as they should be.

    A rank that is slow keeps the others waiting, so that communication is judged by the rank that waits least.

    >>> step_causes(run.view.glances())
    ('waiting for the loader is 62 % of the step (num_workers=0): pass num_workers=4 to the DataLoader',)
    """
    steps = {rank.rank: rank.steps for rank in ranks if rank.steps is not None and rank.steps.total > 0}
    return (*_first_step(ranks), *_slow_ranks(steps), *_of_all(list(steps.values())))


def step_text(steps: StepBreakdown) -> str:
    """
    The parts of a step, the longest first: `12.0 ms: data 62 %, forward 38 %`.

    >>> step_text(StepBreakdown(0, 7, 0.006, 0.003, 0.0, 0.0, 0.0, 0.0, 0.0))
    '9.00 ms: data 67 %, forward 33 %'
    """
    found = sorted(PHASES, key=lambda phase: -_share(steps, phase))
    parts = [f"{phase} {_percent(_share(steps, phase))}" for phase in found if _share(steps, phase) >= 0.005]
    return f"{time_of(steps.total)}: {', '.join(parts)}"


def time_of(seconds: float) -> str:
    """A step's time with three digits: 12.3 ms, 4.56 s."""
    value, unit = (seconds, "s") if seconds >= 1 else (seconds * 1000, "ms")
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def _first_step(ranks: Sequence[RankSummary]) -> Iterator[str]:
    first = max((rank.first_step for rank in ranks if rank.first_step is not None), key=_total, default=None)
    usual = max((rank.steps.total for rank in ranks if rank.steps is not None), default=0.0)
    if first is None or first.total < max(_FIRST_STEP, _TIMES * usual):
        return
    if first.compiled:
        yield f"first step {time_of(first.total)}: compiling"
    elif _share(first, "data") > 0.5:
        workers = "" if first.workers is None else f" (num_workers={first.workers})"
        yield f"first step {time_of(first.total)}: its loader took {time_of(first.data)} to begin{workers}"


def _slow_ranks(steps: Mapping[int, StepBreakdown]) -> Iterator[str]:
    """A sentence for each rank that the others wait for."""
    if len(steps) < 2:
        return
    for rank, mine in steps.items():
        others = [other for number, other in steps.items() if number != rank]
        usual = median(map(_own, others))
        slower = _own(mine) / max(usual, 1e-9) - 1
        if slower < _SLOWER or _own(mine) - usual < _DISTURBED:
            continue
        phases = [phase for phase in PHASES if phase != "communication"]
        longer = {phase: getattr(mine, phase) - median(getattr(other, phase) for other in others) for phase in phases}
        cause = max(phases, key=longer.__getitem__)
        workers = f" (num_workers={mine.workers})" if cause == "data" and mine.workers is not None else ""
        much = _percent(slower) if slower < 2 else f"{slower + 1:.1f} ×"
        how = f"{much} slower" if slower < 2 else f"{much} as slow"
        yield f"rank {rank} is {how}: {_percent(_share(mine, cause))} of its step is {PHASES[cause]}{workers}"


def _of_all(steps: Sequence[StepBreakdown]) -> Iterator[str]:
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
        yield f"waiting for the loader is {_percent(data)} of the step{known}: {advice}"
    if communication >= _COMMUNICATION:
        yield f"communication is {_percent(communication)} of the step: accumulate gradients, or use a larger batch"
    if idle >= _IDLE:
        yield (f"the loop's own code is {_percent(idle)} of the step: log, print and copy results every few steps only")


def _own(steps: StepBreakdown) -> float:
    """What a step takes without the wait for others."""
    return steps.total - steps.communication


def _total(steps: StepBreakdown) -> float:
    return steps.total


def _share(steps: StepBreakdown, phase: str) -> float:
    return float(getattr(steps, phase)) / steps.total if steps.total > 0 else 0.0


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
