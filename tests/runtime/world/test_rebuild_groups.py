"""Process groups can be made anew under everything that was prepared."""

from __future__ import annotations

import torch
import torch.distributed as dist

from accelerate_nb import Accelerator, DistributedDataParallelKwargs
from accelerate_nb.runtime.world.registry import collectives, rebuild_groups
from tests.ranks import run_on_ranks


def gradient(model, rank):
    model.zero_grad()
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def trains_on(kwargs):
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**kwargs)])
    torch.manual_seed(0)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    rank, group = accelerator.process_index, dist.group.WORLD
    before = gradient(model, rank)
    for number in range(3):
        rebuild_groups(f"{number}")
        assert dist.group.WORLD is not group
        after = gradient(model, rank)
        assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    gathered = accelerator.gather(torch.tensor([rank]))
    accelerator.end_training()
    return after[0].tolist(), gathered.tolist(), accelerator.process_index


def test_prepared_models_and_their_accelerator_go_on():
    found = run_on_ranks(trains_on, 2, {})
    assert found == [([[1.5, 1.5]], [0, 1], 0), ([[1.5, 1.5]], [0, 1], 1)]


def test_gradients_that_are_packed_for_the_way_still_are():
    (first, second) = run_on_ranks(trains_on, 2, {"comm_hook": "fp16", "gradient_as_bucket_view": True})
    assert first[0] == second[0] == [[1.5, 1.5]]


def counts():
    Accelerator(cpu=True)
    before = collectives()
    dist.all_reduce(torch.ones(1))
    after = collectives()
    dist.destroy_process_group()
    return [after[name] - before[name] for name in before], collectives()


def test_collectives_are_counted_by_group():
    assert run_on_ranks(counts) == [([1], {})] * 2


def begins_again():
    """A rank whose group is gone makes one together with those that have theirs."""
    accelerator = Accelerator(cpu=True)
    if accelerator.process_index == 1:
        dist.destroy_process_group()
    rebuild_groups("1")
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def test_a_rank_without_a_group_takes_part():
    assert run_on_ranks(begins_again) == [2.0, 2.0]
