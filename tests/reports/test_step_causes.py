"""A rank is called slow where it is, over many windows of steps, and never because ranks share busy cores."""

import random
from collections.abc import Iterator

import pytest

from accelerate_nb.events.event_types import NodeRanks, StepBreakdown
from accelerate_nb.events.run_state import RunState
from accelerate_nb.reports.summary import step_causes

PARTS = {"data": 0.001, "forward": 0.006, "backward": 0.011, "optimizer": 0.002, "idle": 0.001}


def simulated(
    seed: int,
    size: int = 2,
    seconds: int = 60,
    *,
    load: float = 0.0,
    slow: dict[str, float] | None = None,
    is_counted: bool = True,
) -> Iterator[StepBreakdown]:
    """
    The events of ranks that step together, one a second, on busy cores.

    Each rank is held up now and then for some seconds, by up to `load` of its step, and each step has noise of its own. The last rank
    takes `slow` times as long in a phase. `is_counted`: the system counts what a thread waited for a core.
    """
    chance = random.Random(seed)
    held = [0.0] * size  # by how much of its step each rank is held up at the moment
    step = 1
    for second in range(seconds):
        held = [chance.uniform(0, load) if chance.random() < 0.15 else now for now in held]
        own, preempted = [], []
        for rank in range(size):
            # a mean over tens of steps
            parts = {name: part * chance.lognormvariate(0, 0.05) for name, part in PARTS.items()}
            for name, factor in (slow or {}).items() if rank == size - 1 else ():
                parts[name] *= factor
            waits = sum(parts.values()) * held[rank] * chance.uniform(0.6, 1.4)
            parts[chance.choice(["forward", "backward", "backward", "idle"])] += waits
            own.append(parts)
            preempted.append(waits)
        longest = max(sum(parts.values()) for parts in own) + 0.001
        step += round(1 / longest)
        for rank, parts in enumerate(own):
            rest = longest - sum(parts.values())
            waited = preempted[rank] if is_counted else None
            yield StepBreakdown(rank, step, **parts, communication=rest, time=float(second), preempted=waited, cores=2)


def sentences(events: Iterator[StepBreakdown]) -> set[str]:
    """Whatever is shown while the run goes on, up to the names of causes."""
    view, found = RunState(), set()
    for event in events:
        view.apply(event)
        if event.rank == 0 and event.time % 5 < 2:
            found.update(cause.partition(":")[0] for cause in step_causes(view.glances()))
    return found


@pytest.mark.parametrize(("load", "is_counted"), [(0.3, True), (1.0, False)])
def test_none_of_a_hundred_runs_with_equal_ranks_has_a_slow_rank(load: float, is_counted: bool) -> None:
    for seed in range(100):
        found = sentences(simulated(seed, seed % 3 + 2, load=load, is_counted=is_counted))
        assert not [cause for cause in found if cause.startswith("rank ")], (seed, found)


def test_a_rank_that_is_held_up_all_the_time_is_not_slow() -> None:
    view = RunState()
    for second in range(60):
        for rank, waits in enumerate((0.002, 0.02)):
            parts = {**PARTS, "backward": PARTS["backward"] + waits}
            parts["communication"] = 0.042 - sum(parts.values())
            view.apply(StepBreakdown(rank, 30 * second + 2, **parts, time=second, preempted=waits, cores=2))
    assert step_causes(view.glances()) == ("ranks disturb each other: 2 ranks on 2 busy cores",)
    assert step_causes(view.glances(), is_over=True) == ("ranks disturbed each other: 2 ranks on 2 busy cores",)
    nodes = [NodeRanks(0, "a", 0, 0), NodeRanks(1, "b", 1, 1)]
    assert step_causes(view.glances(), nodes) == ("ranks disturb each other: 1 rank on 2 busy cores",)


def test_each_of_a_hundred_stragglers_is_named_with_its_phase() -> None:
    for seed in range(100):
        view = RunState()
        # 1.3 times the others' step
        for event in simulated(seed, seed % 3 + 2, load=0.1, slow={"backward": 1.57}, is_counted=seed % 2 > 0):
            view.apply(event)
        (cause,) = [cause for cause in step_causes(view.glances(), is_over=True) if cause.startswith("rank ")]
        assert cause.startswith(f"rank {seed % 3 + 1} was "), (seed, cause)
        assert cause.endswith("of its step was its backward"), (seed, cause)


def test_a_straggler_is_named_after_some_windows_and_no_sooner() -> None:
    view = RunState()
    first = None
    for event in simulated(0, slow={"data": 8.0}):
        view.apply(event)
        causes = [cause for cause in step_causes(view.glances()) if cause.startswith("rank 1 is ")]
        if causes and first is None:
            first = event.time
            assert causes[0].endswith("of its step is waiting for its loader")
    assert 19 <= first <= 25


def test_few_steps_are_no_window() -> None:
    view = RunState()
    for step in range(2, 40):
        for rank in range(2):
            view.apply(StepBreakdown(rank, step, 0.0, 1.0 + rank, 1.0, 1.0 - rank, 0.0, 0.0, float(step)))
    assert step_causes(view.glances()) == ()
