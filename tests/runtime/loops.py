"""The training loop that is run with ours and with Hugging Face Accelerate, to compare their numbers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset


@dataclass(frozen=True)
class Recipe:
    """One training, small enough to run in a moment."""

    precision: str = "no"
    accumulation: int = 1
    samples: int = 43
    schedule: str = "one_cycle"
    dropout: float = 0.0
    clip: bool = True


@dataclass(frozen=True)
class Numbers:
    """All that a training shows from outside."""

    losses: list[float]
    norms: list[float]
    rates: list[float]
    synced: list[bool]
    weights: list[list[float]]
    gathered: list[list[float]]


def net(dropout: float = 0.0) -> nn.Module:
    """A small network, the same at every call after the same seed."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 1))


def samples(count: int) -> TensorDataset:
    """Regression samples: what is to be found is a fixed function with noise."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(count, 8, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True) + torch.randn(count, 1, generator=generator))


def train_epoch(accelerator: Any, model: Any, optimizer: Any, schedule: Any, loader: Any) -> list[float]:
    """The losses of an epoch, with a schedule or without one."""
    losses = []
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class Streamed(IterableDataset[Any]):
    """The same samples one after the other, whose number nobody is told."""

    def __init__(self, count: int) -> None:
        self.data = samples(count)

    def __iter__(self) -> Iterator[Any]:
        return (self.data[index] for index in range(len(self.data)))


def schedule_of(recipe: Recipe, optimizer: torch.optim.Optimizer) -> Any:
    """A schedule by its name."""
    if recipe.schedule == "one_cycle":
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=22)
    if recipe.schedule == "step":
        return torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.1)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def train(make: Callable[..., Any], recipe: Recipe) -> Numbers:
    """A training with an `Accelerator`, whoever's it is."""
    torch.manual_seed(0)
    accelerator = make(cpu=True, mixed_precision=recipe.precision, gradient_accumulation_steps=recipe.accumulation)
    model = net(recipe.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = schedule_of(recipe, optimizer)
    loader = DataLoader(samples(recipe.samples), batch_size=4, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    torch.manual_seed(accelerator.process_index)  # samples come in one order all the same
    seen = Numbers([], [], [], [], [], [])
    for _ in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                outputs = model(inputs)
                loss = nn.functional.mse_loss(outputs, targets)
                accelerator.backward(loss)
                if recipe.clip and accelerator.sync_gradients:
                    seen.norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            seen.losses.append(loss.item())
            seen.rates.append(schedule.get_last_lr()[0])
            seen.synced.append(accelerator.sync_gradients)
            seen.gathered.append(accelerator.gather_for_metrics(outputs.detach())[:, 0].tolist())
    seen.weights.extend(flat(accelerator.unwrap_model(model)))
    return seen


def flat(model: nn.Module) -> list[list[float]]:
    """All weights as plain numbers, which travel between processes and can be compared exactly."""
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]
