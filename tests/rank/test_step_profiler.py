"""Profiles of steps: what of torch's totals is ranked, and how one ends that gets no whole steps."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from accelerate_nb.events.event_types import ProfiledOperation as Operation
from accelerate_nb.rank import background_tasks, event_sink, step_profiler
from accelerate_nb.rank.step_profiler import ProfileRequest, StepProfiler, costliest, current_step_profiler


def total(key, calls, cpu, device=0.0, where="CPU"):
    """A total of torch's profiler; microseconds."""
    times = {"self_cpu_time_total": cpu, "self_device_time_total": device}
    return SimpleNamespace(key=key, count=calls, device_type=SimpleNamespace(name=where), **times)


def test_operations_are_ranked_by_their_own_time_on_the_cpu():
    found = costliest([total("aten::add", 4, 1e6), total("aten::t", 9, 0.0), total("aten::mm", 2, 3e6)])
    assert found == (Operation("aten::mm", 2, 3.0, 0.75, "cpu"), Operation("aten::add", 4, 1.0, 0.25, "cpu"))


def test_on_a_device_the_time_of_kernels_counts_for_the_operations_that_launched_them():
    totals = [
        total("aten::mm", 2, 1e6, 6e6),
        total("aten::add", 4, 9e6, 2e6),
        total("cudaLaunchKernel", 6, 5e6),
        total("sgemm_128x64", 2, 0.0, 6e6, "CUDA"),
        total("elementwise_kernel", 4, 0.0, 2e6, "CUDA"),
    ]
    found = costliest(totals)
    assert found == (Operation("aten::mm", 2, 6.0, 0.75, "cuda"), Operation("aten::add", 4, 2.0, 0.25, "cuda"))
    many = [total(f"op{number}", 1, number + 1.0) for number in range(20)]
    assert [operation.name for operation in costliest(many)] == [f"op{number}" for number in range(19, 9, -1)]


@pytest.fixture
def sent():
    """The events that this rank sends."""
    events = []
    event_sink.connect(SimpleNamespace(rank=0, send=events.append))
    yield events
    event_sink.connect(None)
    background_tasks.finish()


def test_steps_of_another_optimizer_are_not_counted(sent, tmp_path):
    profiler, first, second = StepProfiler(), object(), object()
    profiler.request(ProfileRequest(0, 1, 2, str(tmp_path)))
    for optimizer in (first, second, first, second, second):
        torch.ones(3).exp()
        profiler.stepped(optimizer)
    assert sent == []
    profiler.stepped(first)
    background_tasks.finish()
    assert (sent[0].steps, sent[0].problem) == (2, "")
    assert {operation.name: operation.calls for operation in sent[0].operations}["aten::exp"] == 4


def test_a_profile_ends_when_no_further_step_comes(sent, tmp_path, monkeypatch):
    monkeypatch.setattr(step_profiler, "_STEP_LIMIT", 0.2)
    monkeypatch.setattr(step_profiler, "_BETWEEN_CHECKS", 0.05)
    profiler, optimizer = current_step_profiler(), object()
    profiler.request(ProfileRequest(0, 1, 10, str(tmp_path)))
    for _ in range(3):
        torch.ones(3).exp()
        profiler.stepped(optimizer)
    deadline = time.monotonic() + 20
    # as in an evaluation, which may have many calls
    while not sent and time.monotonic() < deadline:
        torch.ones(3).log()
        threading.Event().wait(0.01)
    assert (sent[0].steps, sent[0].problem) == (2, "")


def test_a_training_with_a_profiler_of_its_own_keeps_it(sent, tmp_path):
    profiler = StepProfiler()
    profiler.request(ProfileRequest(0, 1, 2, str(tmp_path)))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        torch.ones(3).exp()
        profiler.stepped(object())
    assert "a profiler of its own" in sent[0].problem
    assert "aten::exp" in {event.name for event in own.events()}
