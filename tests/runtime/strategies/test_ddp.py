"""A model that is spread by copies can be let go at any time."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from accelerate_nb.runtime.current import current_world, forget
from accelerate_nb.runtime.strategies.ddp import DDP
from tests.ranks import run_on_ranks


def lives(count: int) -> int:
    for _ in range(count):
        model = DDP(current_world()).wrap_model(nn.Linear(4, 4))
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
        dist.destroy_process_group()
        del model  # the last to know of a group that has ended
    return count


def test_a_model_may_outlive_its_process_group() -> None:
    assert run_on_ranks(lives, 2, 20, limit=30) == [20, 20]


def holds_its_group() -> bool:
    model = DDP(current_world()).wrap_model(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    forget()
    return model.reducer is not None or model.logger is not None


def test_a_model_lets_go_of_its_process_group_before_that_ends() -> None:
    assert run_on_ranks(holds_its_group, 2) == [False, False]
