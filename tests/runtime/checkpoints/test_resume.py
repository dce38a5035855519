"""A training on several processes goes on in new ones bit for bit, also where sums depend on the order of gradients."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate_nb import Accelerator
from accelerate_nb.utils.dataclasses import DistributedDataParallelKwargs
from tests.ranks import run_on_ranks
from tests.runtime.loops import flat


class Deep(nn.Module):
    """A model with several buckets of gradients, whose layers may run in another order at each step, and may have one that is unused."""

    def __init__(self, *, flow: bool = False, unused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([nn.Linear(40, 40) for _ in range(8)])
        self.spare = nn.Linear(40, 40) if unused else None
        self.flow = flow

    def forward(self, values: torch.Tensor, step: int) -> torch.Tensor:
        for layer in reversed(self.layers) if self.flow and step % 2 else self.layers:
            values = torch.tanh(layer(values))
        return values


# Arguments of DDP, of the model, micro-steps, and the steps after which a checkpoint is saved.
BUCKETS: dict[str, tuple[dict[str, Any], dict[str, Any], int, tuple[int, ...]]] = {
    "plain": ({}, {}, 1, (1, 4)),
    "layers in another order": ({}, {"flow": True}, 1, (1, 4)),
    "accumulated": ({"gradient_as_bucket_view": True}, {}, 2, (3, 4)),
    "unused": ({"find_unused_parameters": True}, {"unused": True}, 1, (4,)),
    "static": ({"static_graph": True, "find_unused_parameters": True}, {"unused": True}, 1, (4,)),
}
LAST_STEP = 8


def weights_of_deep(case: str, folder: str, resume_at: int | None = None) -> list[float]:
    ddp, arguments, micro_steps, save_at = BUCKETS[case]
    handler = DistributedDataParallelKwargs(bucket_cap_mb=0.01, **ddp)  # type: ignore[arg-type] # as DDP takes it
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro_steps, kwargs_handlers=[handler])
    built = Deep(**arguments)
    model, optimizer = accelerator.prepare(built, torch.optim.SGD(built.parameters(), 0.05, momentum=0.9))
    if resume_at is not None:
        accelerator.load_state(f"{folder}/{case}/{resume_at}")
    for step in range(resume_at or 0, LAST_STEP):
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs_of_deep(step, accelerator.process_index), step).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
        if resume_at is None and step + 1 in save_at:
            accelerator.save_state(f"{folder}/{case}/{step + 1}")
    found = flat(model)
    accelerator.free_memory()
    return found


def weights_by_ddp_alone(case: str) -> list[float]:
    ddp, arguments, micro_steps, _ = BUCKETS[case]
    model = nn.parallel.DistributedDataParallel(Deep(**arguments), bucket_cap_mb=0.01, **ddp)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for step in range(LAST_STEP):
        is_boundary = (step + 1) % micro_steps == 0
        with nullcontext() if is_boundary else model.no_sync():
            values = inputs_of_deep(step, torch.distributed.get_rank())
            (model(values, step).pow(2).mean() / micro_steps).backward()
        if is_boundary:
            optimizer.step()
            optimizer.zero_grad()
    return flat(model.module)


def inputs_of_deep(step: int, rank: int) -> torch.Tensor:
    return torch.randn(7, 40, generator=torch.Generator().manual_seed(100 * step + rank))


def whole_trainings(folder: str) -> dict[str, list[list[float]]]:
    return {case: [weights_of_deep(case, folder), weights_by_ddp_alone(case)] for case in BUCKETS}


def resumed_trainings(folder: str) -> dict[str, list[list[float]]]:
    return {case: [weights_of_deep(case, folder, step) for step in BUCKETS[case][3]] for case in BUCKETS}


@pytest.mark.slow
def test_gradients_of_three_ranks_are_summed_in_the_order_of_before(tmp_path: Path) -> None:
    wholes = run_on_ranks(whole_trainings, 3, str(tmp_path))
    for whole, resumed in zip(wholes, run_on_ranks(resumed_trainings, 3, str(tmp_path)), strict=True):
        for case, (trained, alone) in whole.items():
            assert trained == alone, f"{case}: saving a checkpoint changes the numbers"
            for step, found in zip(BUCKETS[case][3], resumed[case], strict=True):
                assert found == trained, f"{case}: resumed after step {step}"
