"""The self-test tries settings with real workers, and tells each thing that it finds."""

from __future__ import annotations

import os
import socket
import threading

import pytest
import torch

from accelerate_nb.config.run import resolve
from accelerate_nb.launching import selfcheck
from accelerate_nb.runtime import selfcheck as in_a_worker

NAMES = ["start", *(step.name for step in in_a_worker.STEPS)]


@pytest.fixture(autouse=True)
def _folders(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def wish(**said):
    return resolve({"num_processes": 2, "cpu": True, **said}, {})


@pytest.mark.parametrize(
    "said",
    [
        {"mixed_precision": "bf16"},
        {"gradient_accumulation_steps": 3, "debug": True},
        {"engine": "inline", "num_processes": 1},
        pytest.param({"num_processes": 3, "start_method": "spawn"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_sound_settings_pass_every_check(said):
    told = []
    checks = selfcheck.run(wish(**said), told.append)
    assert [one.name for one in checks] == NAMES
    assert {one.state for one in checks} == {"passed"}, checks
    assert all(one.text for one in checks)
    for name in NAMES:
        states = [one.state for one in told if one.name == name]
        assert states[-2:] == ["running", "passed"]


def test_a_test_leaves_the_notebooks_own_process_alone():
    before = set(os.environ)
    selfcheck.run(wish(engine="inline", num_processes=1))
    assert set(os.environ) == before
    assert not torch.distributed.is_initialized()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_every_gpu_passes():
    checks = selfcheck.run(resolve({"mixed_precision": "bf16"}, {}))
    assert {one.state for one in checks} == {"passed"}, checks


def test_workers_that_cannot_start_are_told():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (check,) = selfcheck.run(wish(use_port=port))
    assert (check.name, check.state) == ("start", "failed")
    assert f"use_port={port} was asked for" in check.text


def wrong(accelerator):
    if accelerator.process_index == 1:
        raise ValueError("not what it should be")
    return "fine"


def test_a_failure_stands_at_the_check_that_failed_and_the_rest_is_left_out(monkeypatch):
    steps = [step._replace(try_it=wrong) if step.name == "loader" else step for step in in_a_worker.STEPS]
    monkeypatch.setattr(in_a_worker, "STEPS", tuple(steps))
    # forked workers have this process's modules
    checks = {one.name: one for one in selfcheck.run(wish(start_method="fork"))}
    assert [one.state for one in checks.values()] == ["passed"] * 4 + ["failed"] + ["left out"] * 2
    assert checks["loader"].text == "rank 1: ValueError: not what it should be"
    assert "All output" in checks["loader"].advice


def hangs(accelerator):
    threading.Event().wait()


def test_a_test_can_be_stopped(monkeypatch):
    steps = [step._replace(try_it=hangs) if step.name == "loader" else step for step in in_a_worker.STEPS]
    monkeypatch.setattr(in_a_worker, "STEPS", tuple(steps))
    told = []

    def stop_there(check):
        told.append(check)
        if (check.name, check.state) == ("loader", "running"):
            test.stop()

    test = selfcheck.SelfCheck(wish(start_method="fork", grace=0.0), stop_there)
    checks = test.run()
    assert [one.state for one in checks] == ["passed"] * 4 + ["left out"] * 3


@pytest.mark.parametrize(
    ("name", "break_it", "says"),
    [
        ("collectives", ("gather", lambda self, tensor: tensor.repeat(2)), "gather should give"),
        ("collectives", ("reduce", lambda self, tensor, *_: tensor), "reduce"),
        ("loader", ("gather_for_metrics", lambda self, data, **_: data), "Each of 23 samples should come once"),
        ("training", ("backward", lambda self, loss: None), "The losses should be those of one process"),
    ],
)
def test_a_wrong_result_fails_its_check(monkeypatch, name, break_it, says):
    step = next(step for step in in_a_worker.STEPS if step.name == name)
    monkeypatch.setattr(in_a_worker, "STEPS", (step,))
    monkeypatch.setattr(in_a_worker.Accelerator, *break_it)
    checks = {one.name: one for one in selfcheck.run(wish(start_method="fork"))}
    assert checks[name].state == "failed"
    assert says in checks[name].text
