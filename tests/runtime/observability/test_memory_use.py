"""The memory of a training: what its tensors hold, counted, and what its process takes beside them."""

from __future__ import annotations

import torch

from accelerate_nb import Accelerator
from accelerate_nb.events.model import MemoryUse
from accelerate_nb.runtime.observability import step_metrics
from accelerate_nb.runtime.observability.step_metrics import MemoryReporter
from tests.runtime.observability.test_step_metrics import listener  # noqa: F401 - a fixture


def test_the_first_step_counts_what_is_held_and_the_process(listener, monkeypatch):  # noqa: F811
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(1000, 500), torch.nn.BatchNorm1d(500, affine=False))
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    monkeypatch.setattr(step_metrics, "resident_bytes", lambda: 10**9)

    def step():
        accelerator.backward(model(torch.randn(4, 1000)).sum())
        optimizer.step()
        optimizer.zero_grad()

    step()
    (found,) = [event for event in listener.events if isinstance(event, MemoryUse)]
    weights = 4 * 500 * 1001
    buffers = 4 * 2 * 500 + 8
    # Adam has two numbers of each weight, and counts steps for each parameter
    assert (found.weights, found.gradients, found.optimizer) == (weights + buffers, weights, 2 * weights + 2 * 4)
    assert (found.peak, found.used, found.total) == (None, 10**9, None)
    # soon after, nothing is measured again; later only where it has changed
    step()
    assert len([event for event in listener.events if isinstance(event, MemoryUse)]) == 1
    monkeypatch.setattr(step_metrics, "_BETWEEN_READINGS", 0.0)
    step()
    assert len([event for event in listener.events if isinstance(event, MemoryUse)]) == 1
    monkeypatch.setattr(step_metrics, "resident_bytes", lambda: 2 * 10**9)
    step()
    assert [event.used for event in listener.events if isinstance(event, MemoryUse)] == [10**9, 2 * 10**9]


def test_tensors_elsewhere_are_not_of_the_device(listener, monkeypatch):  # noqa: F811
    with torch.device("meta"):
        model = torch.nn.Linear(1000, 500)
    reporter = MemoryReporter([model, torch.nn.Linear(2, 1)], [], torch.device("cpu"))
    reporter.first_step()
    assert listener.events[0].weights == 4 * 3
