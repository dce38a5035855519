"""Profiles of steps, requested while a training runs."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import pytest
import torch

from accelerate_nb import launch
from accelerate_nb.errors import ConfigurationError, NotYetError, StateError
from accelerate_nb.events.run_reader import kept_runs, view_of
from tests.launching.detached.trainings import comes
from tests.launching.session.test_session import session  # noqa: F401 - a fixture

SETTINGS = {"num_processes": 2, "cpu": True, "config_file": "", "timeout": 60, "panel": False}


def trains(folder, most=10_000):
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
    run = launch(trains, (str(tmp_path),), folder=str(tmp_path / "runs"), **SETTINGS)
    assert comes(lambda: run.view.has_stepped and {rank.state for rank in run.view.glances()} == {"running"})
    run.profile(steps=3)
    with pytest.raises(StateError, match=r"that of ranks? .* is under way"):
        run.profile(steps=3)
    assert comes(lambda: len(profiles(run.view, 1)) == 2)
    run.profile(steps=2, ranks=[1])
    assert comes(lambda: len(profiles(run.view, 2)) == 1)
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


def test_a_function_that_makes_no_step_is_reported_to_make_none(tmp_path):
    run = launch(waits, (str(tmp_path),), folder=str(tmp_path / "runs"), **SETTINGS)
    assert comes(lambda: {rank.state for rank in run.view.glances()} == {"running"})
    run.profile(ranks=[1])
    Path(tmp_path, "end").touch()
    run.wait(60)
    # a rank that gets the request late has ended its function before
    assert run.view.rank(1).profile.problem.startswith(("no optimizer step was seen", "its function has ended"))


def waits(folder):
    while not Path(folder, "end").exists():
        time.sleep(0.01)


def test_a_cell_of_a_session_is_profiled_until_it_ends(session, tmp_path):  # noqa: F811
    with pytest.raises(StateError, match="no cell runs"):
        session.profile()
    session.run("from tests.launching.test_profile_requests import trains").wait()
    cell = session.run(f"trains({str(tmp_path)!r})")
    assert comes(lambda: session.view.has_stepped)
    cell.profile(steps=2)
    ranks = len(session.view.ranks)
    assert comes(lambda: [profile.steps for profile in profiles(session.view, 1)] == [2] * ranks)
    cell.profile(steps=100)
    # far fewer steps than requested, so that the cell's end cuts it short
    Path(tmp_path, "end").touch()
    cell.wait()
    # a rank that gets the request late has ended its function before
    assert comes(lambda: len(profiles(session.view, 2)) == ranks)
    assert {profile.steps < 100 for profile in profiles(session.view, 2)} == {True}


def test_a_function_in_this_process_is_not_profiled_from_outside(tmp_path):
    settings = {**SETTINGS, "num_processes": 1, "engine": "inline", "timeout": None}
    run = launch(trains, (str(tmp_path), 0), folder=str(tmp_path / "runs"), **settings)
    with pytest.raises(NotYetError, match="runs in this process"):
        run.profile()
