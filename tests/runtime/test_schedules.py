"""A learning rate goes down when, and as often as, Accelerate's does."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from accelerate_nb import Accelerator
from accelerate_nb.runtime.training.optimizer import ScheduleNotice
from accelerate_nb.utils.dataclasses import DataLoaderConfiguration
from tests.peers import Peer, under_both
from tests.ranks import ONE_OR_TWO, run_on_ranks
from tests.runtime.loops import net, samples

SCHEDULES: dict[str, Any] = {
    "one cycle that is too short": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=5),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, epochs=2, steps_per_epoch=11),
    "steps": lambda optimizer: lr_scheduler.StepLR(optimizer, 4, 0.1),
    "warm-up, then cosine": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)],
        milestones=[3],
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"accumulation": {"num_steps": 3}},
    {"accumulation": {"num_steps": 2, "adjust_scheduler": False}},
    {"step_scheduler_with_optimizer": False, "accumulation": {"num_steps": 2}},
    {"split_batches": True},
]


def rates(peer: Peer) -> dict[str, list[Any]]:
    warnings.simplefilter("ignore")
    found: dict[str, list[Any]] = {}
    for options in OPTIONS:
        for name, make in SCHEDULES.items():
            found[f"{name} {options}"] = of_one(peer, name, make, dict(options))
            peer.door("state").GradientState._reset_state()
    return found


def of_one(peer: Peer, name: str, make: Any, options: dict[str, Any]) -> list[Any]:
    torch.manual_seed(0)
    utils = peer.door("utils")
    accelerator = peer.Accelerator(
        cpu=True,
        step_scheduler_with_optimizer=options.get("step_scheduler_with_optimizer", True),
        dataloader_config=utils.DataLoaderConfiguration(split_batches=options.get("split_batches", False)),
        gradient_accumulation_plugin=utils.GradientAccumulationPlugin(**options.get("accumulation", {})),
    )
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = DataLoader(samples(43 if not options.get("split_batches") else 40), batch_size=4)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, make(optimizer))
    seen = []
    for _ in range(2):
        for inputs, targets in data:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                try:
                    schedule.step(*[1.0] * (name == "plateau"))  # the same metric on all processes
                except ValueError as error:  # what OneCycleLR says of a step too many
                    return [*seen, str(error)]
                optimizer.zero_grad()
            seen += [schedule.get_last_lr()[0], getattr(schedule.scheduler, "_step_count", 0)]
    return [*seen, *[value for value in schedule.state_dict().values() if isinstance(value, float)]]


@pytest.mark.slow
@pytest.mark.parametrize("size", ONE_OR_TWO)
def test_rates_are_accelerates(size: int) -> None:
    both = under_both(rates, size)
    assert both.ours == both.theirs


def notices(split: bool, with_optimizer: bool) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        config = DataLoaderConfiguration(split_batches=split)
        accelerator = Accelerator(dataloader_config=config, step_scheduler_with_optimizer=with_optimizer)
        for _ in range(3):
            optimizer = torch.optim.SGD(net().parameters(), lr=0.05)
            accelerator.prepare(optimizer, lr_scheduler.StepLR(optimizer, 4))
    return [str(item.message) for item in caught if item.category is ScheduleNotice]


def test_a_schedule_that_moves_several_times_in_a_step_reports_it_once() -> None:
    (message,), nothing = run_on_ranks(notices, 2, False, True)
    assert "moves 2 times in a step" in message
    assert nothing == []
    assert run_on_ranks(notices, 1, False, True) == [[]]
    assert run_on_ranks(notices, 2, True, True) == [[], []]
    assert run_on_ranks(notices, 2, False, False) == [[], []]
