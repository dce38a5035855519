"""Several Accelerators one after another in one worker each start clean, whatever the former one had chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelerate_nb import Accelerator
from tests.ranks import run_on_ranks


def accelerator_facts(precision: str, steps: int, *, ends: bool) -> list[Any]:
    accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=steps, cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2))
    prepared = accelerator.prepare(model)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    inside: list[torch.dtype] = []
    model[0].register_forward_hook(lambda module, given, output: inside.append(output.dtype))
    synchronised = []
    for _ in range(2 * steps):
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(torch.ones(3, 4) * (accelerator.process_index + 1)).sum())
            optimizer.step()
            optimizer.zero_grad()
            synchronised.append(accelerator.sync_gradients)
    rank = torch.tensor([accelerator.process_index])
    ranks = accelerator.gather(rank).tolist()
    equal = bool(accelerator.gather(model[0].weight.detach()[None]).std(0).max() == 0)
    found = [accelerator.mixed_precision, str(inside[0])[6:], synchronised, ranks, equal, accelerator.step]
    if ends:
        accelerator.end_training()
    return found


def accelerators_in_turn(ends: bool) -> list[Any]:
    return [accelerator_facts(precision, steps, ends=ends) for precision, steps in (("no", 2), ("bf16", 1), ("no", 3))]


@pytest.mark.parametrize("ends", [True, False])
def test_a_new_accelerator_computes_in_other_numbers_whether_the_former_one_has_ended_or_not(ends: bool) -> None:
    assert run_on_ranks(accelerators_in_turn, 2, ends) == 2 * [
        [
            ["no", "float32", [False, True] * 2, [0, 1], True, 4],
            ["bf16", "bfloat16", [True] * 2, [0, 1], True, 2],
            ["no", "float32", [False, False, True] * 2, [0, 1], True, 6],
        ]
    ]


def many_accelerators():
    for _ in range(300):
        accelerator = Accelerator()
    return accelerator.gather(torch.ones(1)).sum().item()


def test_a_worker_may_make_any_number_of_accelerators():
    assert run_on_ranks(many_accelerators, 2, limit=30) == [2.0, 2.0]
