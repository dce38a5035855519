"""A training that is saved in the middle of an epoch goes on in new processes bit for bit, whatever reads its data."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from accelerate_nb import Accelerator
from accelerate_nb.utils.dataclasses import DataLoaderConfiguration
from tests.ranks import run_on_ranks
from tests.runtime.loops import flat, net, samples

SAVE_AT = 5  # inside a window of two micro-steps, in the first epoch's middle


class Stream(IterableDataset[Any]):
    """Samples that come one after the other."""

    def __iter__(self) -> Iterator[Any]:
        yield from samples(48)


KINDS: dict[str, tuple[Callable[[], DataLoader[Any]], DataLoaderConfiguration]] = {
    "shuffled": (lambda: DataLoader(samples(48), batch_size=3, shuffle=True), DataLoaderConfiguration()),
    "seedable": (
        lambda: DataLoader(samples(48), batch_size=3, shuffle=True),
        DataLoaderConfiguration(use_seedable_sampler=True),
    ),
    "dispatched": (
        lambda: DataLoader(samples(48), batch_size=3, shuffle=True),
        DataLoaderConfiguration(dispatch_batches=True),
    ),
    "split": (
        lambda: DataLoader(samples(48), batch_size=4, shuffle=True),
        DataLoaderConfiguration(split_batches=True),
    ),
    "iterable": (lambda: DataLoader(Stream(), batch_size=3), DataLoaderConfiguration(dispatch_batches=False)),
    "iterable, dispatched": (lambda: DataLoader(Stream(), batch_size=3), DataLoaderConfiguration()),
    "workers": (
        lambda: DataLoader(samples(48), batch_size=3, shuffle=True, num_workers=2, persistent_workers=True),
        DataLoaderConfiguration(),
    ),
}


class Run:
    """One training, with all that it draws and sees."""

    def __init__(self, kind: str) -> None:
        make, config = KINDS[kind]
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        self.accelerator = Accelerator(
            cpu=True, mixed_precision="fp16", gradient_accumulation_steps=2, dataloader_config=config
        )
        model = net(dropout=0.3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        self.model, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
            model, optimizer, schedule, make()
        )
        self.seen: list[Any] = []

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        with self.accelerator.accumulate(self.model):
            loss = nn.functional.mse_loss(self.model(inputs), targets)
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        draws = random.random(), float(np.random.rand()), torch.rand(1).item()
        self.seen.append((loss.item(), inputs.tolist(), draws, self.schedule.get_last_lr()))

    def epoch(self, loader: Any = None, folder: str = "") -> None:
        for batch in self.loader if loader is None else loader:
            self.step(*batch)
            if folder and len(self.seen) == SAVE_AT:
                self.accelerator.save_state(folder, blocking=False)

    def outcome(self, since: int = 0) -> tuple[Any, ...]:
        self.accelerator.wait_for_checkpoint()
        state = self.optimizer.state_dict()["state"]
        moments = [value.tolist() for item in state.values() for value in item.values()]
        scaler = self.accelerator.scaler
        assert scaler is not None
        found = self.seen[since:], flat(self.model), moments, scaler.state_dict(), self.accelerator.step
        self.accelerator.free_memory()
        return found


def straight_on(folder: str) -> dict[str, Any]:
    found = {}
    for kind in KINDS:
        run = Run(kind)
        run.epoch(folder=f"{folder}/{kind}")
        run.epoch()
        found[kind] = run.outcome(SAVE_AT)
    return found


def resumed(folder: str) -> dict[str, Any]:
    found = {}
    for kind in KINDS:
        run = Run(kind)
        torch.manual_seed(77)
        run.accelerator.load_state(f"{folder}/{kind}")
        run.epoch()
        run.epoch()
        found[kind] = run.outcome()
    return found


def resumed_by_skipping(folder: str) -> dict[str, Any]:
    """As loops that were written for Accelerate do it."""
    found = {}
    for kind in KINDS:
        run = Run(kind)
        torch.manual_seed(77)
        run.accelerator.load_state(f"{folder}/{kind}")
        run.epoch(run.accelerator.skip_first_batches(run.loader, SAVE_AT))
        run.epoch()
        found[kind] = run.outcome()
    return found


def compare(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> None:
    names = ("losses, batches, draws and rates", "weights", "moments", "scaler", "micro-steps")
    for before, after in zip(first, second, strict=True):
        for kind in after:
            for name, expected, found in zip(names, before[kind], after[kind], strict=True):
                assert found == expected, f"{name} of {kind}"


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_every_kind_of_loader_goes_on_in_the_middle_of_an_epoch(tmp_path: Path, size: int) -> None:
    straight = run_on_ranks(straight_on, size, str(tmp_path))
    compare(straight, run_on_ranks(resumed, size, str(tmp_path)))
    if size == 2:
        compare(straight, run_on_ranks(resumed_by_skipping, size, str(tmp_path)))
