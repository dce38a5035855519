"""The self-test tries settings with real workers, and tells each thing that it finds."""

import os
import socket
import threading

import pytest
import torch

from accelerate_nb.config.run_config import resolve
from accelerate_nb.launching import self_test
from accelerate_nb.runtime.observability import self_test as in_a_worker

NAMES = ["start", *(step.name for step in in_a_worker.STEPS)]


@pytest.fixture(autouse=True)
def _folders(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def config_of(**settings):
    return resolve({"num_processes": 2, "cpu": True, **settings}, {})


@pytest.mark.parametrize(
    "settings",
    [
        {"mixed_precision": "bf16"},
        {"gradient_accumulation_steps": 3, "debug": True},
        {"engine": "inline", "num_processes": 1},
        pytest.param({"num_processes": 3, "start_method": "spawn"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_sound_settings_pass_every_check_and_leave_the_notebook_s_own_process_alone(settings):
    reported, before = [], set(os.environ)
    checks = self_test.SelfTest(config_of(**settings), reported.append).run()
    assert [item.name for item in checks] == NAMES
    assert {item.state for item in checks} == {"passed"}, checks
    assert all(item.text for item in checks)
    for name in NAMES:
        states = [item.state for item in reported if item.name == name]
        assert states[-2:] == ["running", "passed"]
    assert set(os.environ) == before
    assert not torch.distributed.is_initialized()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_every_gpu_passes():
    checks = self_test.SelfTest(resolve({"mixed_precision": "bf16"}, {})).run()
    assert {item.state for item in checks} == {"passed"}, checks


def test_workers_that_cannot_start_are_reported():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (check,) = self_test.SelfTest(config_of(use_port=port)).run()
    assert (check.name, check.state) == ("start", "failed")
    assert f"use_port={port} was requested" in check.text


def fails(*args, **kwargs):
    raise RuntimeError("the NVIDIA driver is too old")


def test_an_accelerator_that_fails_is_a_failure_of_the_first_check(monkeypatch):
    monkeypatch.setattr(in_a_worker, "Accelerator", fails)
    checks = self_test.SelfTest(config_of(start_method="fork", num_processes=1)).run()
    assert [item.state for item in checks] == ["passed", "failed"] + ["left out"] * 5
    assert checks[1].text == "rank 0: RuntimeError: the NVIDIA driver is too old"


def hangs(accelerator):
    threading.Event().wait()


def with_step(monkeypatch, name, try_it):
    steps = [step._replace(try_it=try_it) if step.name == name else step for step in in_a_worker.STEPS]
    monkeypatch.setattr(in_a_worker, "STEPS", tuple(steps))


def test_a_test_can_be_stopped(monkeypatch):
    with_step(monkeypatch, "loader", hangs)
    reported = []

    def stop_at_loader(check):
        reported.append(check)
        if (check.name, check.state) == ("loader", "running"):
            test.stop()

    test = self_test.SelfTest(config_of(start_method="fork", stop_grace_period=0.0), stop_at_loader)
    checks = test.run()
    assert [item.state for item in checks] == ["passed"] * 4 + ["left out"] * 3


@pytest.mark.parametrize(
    ("name", "break_it", "text"),
    [
        ("collectives", ("gather", lambda self, tensor: tensor.repeat(2)), "gather should give"),
        ("collectives", ("reduce", lambda self, tensor, *_: tensor), "reduce"),
        ("loader", ("gather_for_metrics", lambda self, data, **_: data), "Each of 23 samples should come once"),
        ("training", ("backward", lambda self, loss: None), "The losses should be those of one process"),
    ],
)
def test_a_wrong_result_fails_its_check(monkeypatch, name, break_it, text):
    step = next(step for step in in_a_worker.STEPS if step.name == name)
    monkeypatch.setattr(in_a_worker, "STEPS", (step,))
    monkeypatch.setattr(in_a_worker.Accelerator, *break_it)
    checks = {item.name: item for item in self_test.SelfTest(config_of(start_method="fork")).run()}
    assert checks[name].state == "failed"
    assert text in checks[name].text
