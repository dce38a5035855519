"""Requests to ranks while they train: a stop or a knob's change after a step that all share, and profiles."""

import gzip
import json
import math
import time
from pathlib import Path

import pytest
import torch
from msgspec import structs

from accelerate_nb import Accelerator, launch
from accelerate_nb.errors import ConfigurationError, NotYetError, StateError
from accelerate_nb.events.event_types import HeldAt
from accelerate_nb.events.run_reader import kept_runs, view_of
from accelerate_nb.launching.step_requests import StopNegotiation
from accelerate_nb.rank.step_hold import STOP
from tests.launching.test_session import session  # noqa: F401 - a fixture
from tests.waiting import until, until_lines

SETTINGS = {"num_processes": 2, "cpu": True, "config_file": "", "timeout": 60, "results": "all", "panel": False}


# ------------------------------------------------------------------------------------------------- stops


def negotiation(*positions, stop_grace_period=2.0):
    found = StopNegotiation(ranks=range(len(positions)), stop_grace_period=stop_grace_period, now=0.0)
    for rank, position in enumerate(positions):
        found.reply(rank, position, now=1.0)
    return found


def at(steps, pace=0.1, *, checks=False):
    return HeldAt(0, STOP, steps, pace, checks)


def checked(times, pace=0.1):
    return HeldAt(0, STOP, None, pace, checks=True, stepless_checks=times)


def test_the_last_step_is_one_more_than_the_farthest_rank_has_made_once_all_have_answered():
    assert negotiation(at(7), at(9), at(8)).last_step == 10
    waits = StopNegotiation(ranks=[0, 1], stop_grace_period=2.0, now=0.0)
    waits.reply(0, at(7), now=1.0)
    assert waits.last_step is None
    assert not waits.needs_force([], now=1.9)
    assert waits.needs_force([], now=2.1)


@pytest.mark.parametrize(
    ("first", "second", "time"),
    [
        (at(7), None, 0.0),
        (at(7), HeldAt(1, STOP, None), 0.0),
        (at(7, pace=10.0), at(7), 33.0),
        # it saves
        (structs.replace(at(7), saves=True), at(7), 303.0),
        # some looks behind
        (checked(7, pace=10.0), checked(9), 53.0),
    ],
)
def test_ranks_have_the_time_that_their_way_to_the_stop_takes_and_once_all_have_come_as_long_as_they_like(
    first, second, time
):
    comes = negotiation(first, second)
    assert time == 0.0 or not comes.needs_force([], now=time - 0.1)
    assert comes.needs_force([], now=time + 0.1)
    if time:
        comes.stopped.add(0)
        assert comes.needs_force([], now=1000.0)
        assert not comes.needs_force([1], now=1000.0)
        comes.stopped.add(1)
        assert not comes.needs_force([], now=1000.0)


@pytest.mark.parametrize(
    ("positions", "raises", "looks"),
    [
        ((at(7), at(7, checks=True)), True, [None, None]),
        ((at(7, checks=True), at(7, checks=True)), False, [1, 1]),
        # those that make no steps stop at the look after the farthest one's, where all look
        ((checked(7), checked(9)), False, [10, 10]),
        ((checked(7), at(9)), True, [None, None]),
        # far apart, each at its next one
        ((checked(7), checked(90)), False, [8, 91]),
    ],
)
def test_ranks_stop_at_a_look_where_all_look_and_are_ended_by_an_exception_otherwise(positions, raises, looks):
    agreed = negotiation(*positions)
    assert agreed.raises is raises
    assert [agreed.stop_point_of(rank).stepless_checks for rank in range(2)] == looks


# ------------------------------------------------------------------------------------------------- knobs


def trains(folder, is_slow_rank=-1):
    """Steps that no rank waits for the others in, until its knob was changed to 0.5; the values of all steps."""
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), 0.1))
    lr = accelerator.knob("lr", 0.1, min=0.01, max=1.0)
    used = []
    while len(used) < 5000 and used[-3:] != [0.5] * 3:
        used.append(lr.value)
        optimizer.step()
        time.sleep(0.004 if accelerator.process_index == is_slow_rank else 0.001)
    assert accelerator.knob("lr", 0.1, min=0.01, max=1.0) is lr
    Path(folder, f"done_{accelerator.process_index}").touch()
    return used


def test_a_knob_changes_on_all_ranks_after_the_same_step(tmp_path):
    run = launch(trains, (str(tmp_path), 1), folder=str(tmp_path / "runs"), **SETTINGS)
    until(lambda: len([rank for rank in run.view.glances() if rank.knobs]) == 2)
    with pytest.raises(ConfigurationError, match=r"'rl' was to be changed.*'lr'"):
        run.set_knob("rl", 0.5)
    for bad in (2.0, float("nan"), "0.5", True):
        with pytest.raises(ConfigurationError, match="Knob 'lr' was given"):
            run.set_knob("lr", bad)
    run.set_knob("lr", 0.2)
    run.set_knob("lr", 0.25)
    until(lambda: [rank.knobs["lr"].value for rank in run.view.glances()] == [0.25, 0.25])
    run.set_knob("lr", 0.5)
    first, second = run.wait(60)
    for value in (0.25, 0.5):
        assert first.index(value) == second.index(value)
    knobs = [rank.knobs["lr"] for rank in run.view.glances()]
    assert {(knob.value, knob.step, knob.changed) for knob in knobs} == {(0.5, first.index(0.5), True)}
    with pytest.raises(StateError, match="the run is finished"):
        run.set_knob("lr", 0.25)
    # the change is kept in the run's folder
    (kept,) = kept_runs(tmp_path / "runs")
    assert view_of(kept).knobs()["lr"].value == 0.5


def test_a_knob_without_a_panel_keeps_its_value():
    knob = Accelerator(cpu=True).knob("momentum", 0.9, max=1.0)
    assert (knob.value, float(knob)) == (0.9, 0.9)
    # as if there were none
    knob = Accelerator(cpu=True).knob("momentum", 0.9, min=-math.inf, max=math.inf)
    assert (knob.least, knob.most) == (None, None)
    with pytest.raises(ConfigurationError, match="takes at most 1"):
        Accelerator(cpu=True).knob("momentum", 1.5, max=1.0)


def evaluates(folder):
    accelerator = Accelerator(cpu=True)
    accelerator.knob("lr", 0.1)
    until(Path(folder, "go").exists)
    return accelerator.knob("lr", 0.1).value


def test_a_knob_or_a_profile_that_no_step_follows_is_reported(tmp_path):
    run = launch(evaluates, (str(tmp_path),), folder=str(tmp_path / "runs"), **SETTINGS)
    until(lambda: len([rank for rank in run.view.glances() if rank.knobs]) == 2)
    run.set_knob("lr", 0.5)
    run.profile(ranks=[1])
    until_lines(run, 2)
    Path(tmp_path, "go").touch()
    assert run.wait(60) == [0.1, 0.1]
    assert "A knob was not changed: no optimizer" in run.logs(0)
    # a rank that gets the request late has ended its function before
    assert run.view.rank(1).profile.problem.startswith(("no optimizer step was seen", "its function has ended"))


def test_a_cell_of_a_session_has_knobs(session, tmp_path):  # noqa: F811
    session.run("from tests.launching.test_step_requests import trains").wait()
    cell = session.run(f"trains({str(tmp_path)!r})")
    until(lambda: len([rank for rank in session.view.glances() if rank.knobs]) == 2)
    cell.set_knob("lr", 0.5)
    first, second = (end.result["text/plain"] for end in cell.wait())
    assert first == second
    with pytest.raises(StateError, match="no cell runs"):
        cell.set_knob("lr", 0.5)


# ---------------------------------------------------------------------------------------------- profiles


def steps_of_plain_torch(folder, most=10_000):
    """Steps of plain torch until a file `end` is there, or so many."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = 0
    while step < most and not Path(folder, "end").exists():
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        step += 1
        time.sleep(0.002)


def profiles(view, number):
    return [found.profile for found in view.glances() if found.profile and found.profile.number == number]


def test_a_profile_has_the_costliest_operations_of_each_rank_and_a_trace(tmp_path):
    run = launch(steps_of_plain_torch, (str(tmp_path),), folder=str(tmp_path / "runs"), **SETTINGS)
    until(lambda: run.view.has_stepped and {rank.state for rank in run.view.glances()} == {"running"})
    run.profile(steps=3)
    with pytest.raises(StateError, match=r"that of ranks? .* is under way"):
        run.profile(steps=3)
    until(lambda: len(profiles(run.view, 1)) == 2)
    run.profile(steps=2, ranks=[1])
    until(lambda: len(profiles(run.view, 2)) == 1)
    for steps, ranks, words in ((0, None, "1 to 100 steps"), (3, [0, 2], "rank 2 was requested")):
        with pytest.raises(ConfigurationError, match=words):
            run.profile(steps=steps, ranks=ranks)
    # one that the end of the function cuts short has the steps made until then
    run.profile(steps=100, ranks=[0])
    Path(tmp_path, "end").touch()
    run.wait(60)
    with pytest.raises(StateError, match="the run is finished"):
        run.profile()
    first, second = run.view.rank(0).profile, run.view.rank(1).profile
    assert (first.number, second.number, second.steps, second.problem) == (3, 2, 2, "")
    assert first.steps < 100
    (kept,) = kept_runs(tmp_path / "runs")
    saved = view_of(kept).rank(1).profile
    assert saved == second
    names = {operation.name: operation.calls for operation in saved.operations}
    assert names["aten::addmm"] == 2
    assert sum(operation.share for operation in saved.operations) <= 1.0001
    assert saved.operations == tuple(sorted(saved.operations, key=lambda operation: -operation.seconds))
    for rank in (0, 1):
        with gzip.open(run.folder / f"profile_1_rank_{rank}.json.gz") as file:
            trace = json.load(file)["traceEvents"]
        assert len([event for event in trace if event.get("name") == "aten::addmm"]) == 3


def test_a_cell_of_a_session_is_profiled_until_it_ends(session, tmp_path):  # noqa: F811
    session.run("from tests.launching.test_step_requests import steps_of_plain_torch").wait()
    cell = session.run(f"steps_of_plain_torch({str(tmp_path)!r})")
    until(lambda: session.view.has_stepped)
    cell.profile(steps=2)
    ranks = len(session.view.ranks)
    until(lambda: [profile.steps for profile in profiles(session.view, 1)] == [2] * ranks)
    cell.profile(steps=100)
    # far fewer steps than requested, so that the cell's end cuts it short
    Path(tmp_path, "end").touch()
    cell.wait()
    # a rank that gets the request late has ended its function before
    until(lambda: len(profiles(session.view, 2)) == ranks)
    assert {profile.steps < 100 for profile in profiles(session.view, 2)} == {True}
    with pytest.raises(StateError, match="no cell runs"):
        cell.profile()


def test_a_function_in_this_process_is_not_profiled_from_outside(tmp_path):
    settings = {**SETTINGS, "num_processes": 1, "engine": "inline", "timeout": None}
    run = launch(steps_of_plain_torch, (str(tmp_path), 0), folder=str(tmp_path / "runs"), **settings)
    with pytest.raises(NotYetError, match="runs in this process"):
        run.profile()
