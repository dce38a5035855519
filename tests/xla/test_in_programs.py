"""Gradients and buffers that are shared inside the programs of the devices, as on a TPU, give what plain processes get."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelerate_nb.errors import WorkerError
from tests.ranks import run_on_ranks
from tests.xla.weights import fixed

# Ranks on XLA's CPU backend share them through their hosts, because its one pool of threads lets two devices of a process wait
# for each other now and then, and then ends it after 10 seconds. Here it is let be: a process that was ended is tried again.
TRIES = 6
RENDEZVOUS = "Termination timeout"


def training(in_programs: bool) -> tuple[list[list[float]], list[float], int]:
    """A few steps of a model with buffers: its weights, its buffers and how many programs were compiled for them."""
    from torch.utils.data import DataLoader

    from accelerate_nb import Accelerator
    from accelerate_nb.runtime.strategies import xla_ddp

    if in_programs:
        xla_ddp.lockstep = lambda: None
    accelerator = Accelerator(cpu=not in_programs)
    model = fixed(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    data = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
    for batch in loader:
        accelerator.backward((model(batch[:, :5])[:, 0] - batch[:, 5]).pow(2).mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    plain = accelerator.unwrap_model(model)
    accelerator.wait_for_everyone()
    compiled = 0
    if in_programs:
        from accelerate_nb.runtime.xla.device import compilations

        compiled = compilations()
    weights = [parameter.detach().cpu().flatten().tolist() for parameter in plain.parameters()]
    return weights, plain[1].running_mean.cpu().tolist(), compiled


@pytest.mark.slow
@pytest.mark.timeout(TRIES * 40)
def test_a_step_that_shares_gradients_inside_its_program_gives_the_weights_of_plain_processes(on_xla: Any) -> None:
    expected = run_on_ranks(training, 2, False)
    for _ in range(TRIES):
        try:
            found = on_xla(training, True, num_processes=2)
            break
        except WorkerError as error:
            if RENDEZVOUS not in str(error):
                raise
    else:
        pytest.skip(f"XLA's CPU backend ended the process {TRIES} times in its collectives")
    for rank in range(2):
        for ours, theirs in zip(found[rank][0], expected[rank][0], strict=True):
            assert ours == pytest.approx(theirs, abs=2e-5)
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(expected[0][1], abs=2e-5)
    # the first step, and all others
    assert found[0][2] <= 4
