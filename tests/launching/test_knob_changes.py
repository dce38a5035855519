"""Knobs: numbers that are changed while a training runs, by every rank after the same step."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from accelerate_nb import Accelerator, launch
from accelerate_nb.errors import ConfigurationError, StateError
from accelerate_nb.events.run_reader import kept_runs, view_of
from tests.launching.session.test_session import session  # noqa: F401 - a fixture

SETTINGS = {"num_processes": 2, "cpu": True, "config_file": "", "timeout": 60, "results": "all", "panel": False}


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


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        threading.Event().wait(0.02)
    assert condition()


def test_a_knob_changes_on_all_ranks_after_the_same_step(tmp_path):
    run = launch(trains, (str(tmp_path), 1), folder=str(tmp_path / "runs"), **SETTINGS)
    wait_for(lambda: len([rank for rank in run.view.glances() if rank.knobs]) == 2)
    with pytest.raises(ConfigurationError, match=r"'rl' was to be changed.*'lr'"):
        run.set_knob("rl", 0.5)
    for bad in (2.0, float("nan"), "0.5", True):
        with pytest.raises(ConfigurationError, match="Knob 'lr' was given"):
            run.set_knob("lr", bad)
    run.set_knob("lr", 0.2)
    run.set_knob("lr", 0.25)
    wait_for(lambda: [rank.knobs["lr"].value for rank in run.view.glances()] == [0.25, 0.25])
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
    with pytest.raises(ConfigurationError, match="takes at most 1"):
        Accelerator(cpu=True).knob("momentum", 1.5, max=1.0)


def evaluates(folder):
    accelerator = Accelerator(cpu=True)
    accelerator.knob("lr", 0.1)
    while not Path(folder, "go").exists():
        time.sleep(0.01)
    return accelerator.knob("lr", 0.1).value


def test_a_knob_that_no_step_follows_is_reported_to_stay(tmp_path):
    run = launch(evaluates, (str(tmp_path),), folder=str(tmp_path / "runs"), **SETTINGS)
    wait_for(lambda: len([rank for rank in run.view.glances() if rank.knobs]) == 2)
    run.set_knob("lr", 0.5)
    wait_for(lambda: run.view.line_count >= 2)
    Path(tmp_path, "go").touch()
    assert run.wait(60) == [0.1, 0.1]
    assert "A knob was not changed: no optimizer" in run.logs(0)


def test_a_cell_of_a_session_has_knobs(session, tmp_path):  # noqa: F811
    with pytest.raises(StateError, match="no cell runs"):
        session.set_knob("lr", 0.5)
    session.run("from tests.launching.test_knob_changes import trains").wait()
    cell = session.run(f"trains({str(tmp_path)!r})")
    wait_for(lambda: len([rank for rank in session.view.glances() if rank.knobs]) == 2)
    cell.set_knob("lr", 0.5)
    first, second = (end.result["text/plain"] for end in cell.wait())
    assert first == second
