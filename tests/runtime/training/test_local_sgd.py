"""Processes that step by themselves are averaged when it is time."""

from typing import Any

import pytest
import torch
from torch import nn

from accelerate_nb import Accelerator, FullyShardedDataParallelPlugin
from accelerate_nb.errors import NotYetError
from accelerate_nb.local_sgd import LocalSGD
from tests.peers import Peer, under_both
from tests.ranks import ONE_OR_TWO, run_on_ranks
from tests.runtime.loops import flat, net, samples

STEPS = 7


def batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    data = samples(STEPS * 8)
    return [data[slice(step * 8 + rank * 4, step * 8 + rank * 4 + 4)] for step in range(STEPS)]


def local_steps(peer: Peer, every: int, enabled: bool, precision: str) -> list[Any]:
    torch.manual_seed(0)
    accelerator = peer.Accelerator(cpu=True, mixed_precision=precision)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    local_sgd = peer.door("local_sgd").LocalSGD
    seen = []
    with local_sgd(accelerator=accelerator, model=model, local_sgd_steps=every, enabled=enabled) as local:
        for inputs, targets in batches(accelerator.process_index):
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            local.step()
            seen.append(flat(model))
    return [*seen, flat(model)]


@pytest.mark.parametrize("size", ONE_OR_TWO)
def test_local_steps_give_accelerates_numbers(size: int) -> None:
    for every, enabled, precision in ((2, True, "bf16"), (3, False, "no"), (3, True, "no")):
        both = under_both(local_steps, size, every, enabled, precision)
        assert both.ours == both.theirs
    first, last = both.ours[0], both.ours[-1]
    assert (first[1] == last[1]) == (size == 1)  # between two averages each process is by itself
    assert (first[2], first[-1]) == (last[2], last[-1])


def fails_alone() -> tuple[bool, bool]:
    accelerator = Accelerator()
    model = accelerator.prepare(net())
    try:
        with LocalSGD(accelerator, model, 2):
            if accelerator.process_index == 1:
                raise KeyError("one process only")
            held = not model.require_backward_grad_sync
            raise ValueError
    except (KeyError, ValueError) as error:
        return isinstance(error, KeyError) or held, model.require_backward_grad_sync


def test_a_process_that_fails_leaves_the_block_without_waiting_for_the_others() -> None:
    assert run_on_ranks(fails_alone, 2) == [(True, True)] * 2


def off_with_fsdp() -> tuple[bool, bool]:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    with pytest.raises(NotYetError, match="enabled=False"):
        LocalSGD(accelerator, net(), 2)
    with LocalSGD(accelerator, net(), 2, enabled=False) as local:
        local.step()
    return accelerator.strategy.copies_are_whole, local.enabled


def test_where_a_process_has_no_whole_copy_it_can_be_off() -> None:
    assert run_on_ranks(off_with_fsdp, 2) == [(False, False)] * 2
