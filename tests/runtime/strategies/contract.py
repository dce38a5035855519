"""The training that every strategy has to end with the same weights: the loop, and the strategies that run it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_nb import DDP, Accelerator, ParallelismConfig, Strategy
from accelerate_nb.utils import FullyShardedDataParallelPlugin

SAMPLES, BATCH, ACCUMULATION, MOST = 48, 8, 2, 0.5
# What the order of additions may change.
ROUNDING = 1e-6
# Two epochs; it is saved inside of one, and of a window of accumulation.
MICRO_STEPS, SAVED_AFTER = 12, 3
_PAGE = Path(__file__).parents[3] / "docs" / "custom_strategy.md"
Weights = list[list[float]]


@dataclass(frozen=True)
class StrategyCase:
    """A strategy by its arguments of `Accelerator`, on so many ranks."""

    name: str
    ranks: int
    arguments: Callable[[], dict[str, Any]] = dict


def documented_strategy() -> type[Strategy]:
    """The class that the documentation shows."""
    namespace: dict[str, Any] = {}
    found = re.search(r"```python\n(.*?)```", _PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    assert found[1].count("\n") <= 40
    exec(found[1], namespace)  # the page's own code is what is tested
    strategy: type[Strategy] = namespace["OneMessage"]
    return strategy


def of_documentation() -> dict[str, Any]:
    return {"strategy": documented_strategy()}


def by_mesh(**degrees: int) -> dict[str, Any]:
    return {"parallelism_config": ParallelismConfig(**degrees)}


def of_shards() -> dict[str, Any]:
    from tests.runtime.strategies.sharded import Sharded

    return {"strategy": Sharded}


def sharded(**settings: Any) -> dict[str, Any]:
    return {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2, **settings)}


class WithoutReduction(DDP):
    """A strategy of which the one reduction is deleted."""

    def wrap_model(self, model: nn.Module) -> nn.Module:
        return model


# A new strategy enters by one line; `make test-all` runs those on four ranks.
CASES: Sequence[StrategyCase] = (
    StrategyCase("one process", 1),
    StrategyCase("DDP", 2),
    StrategyCase("DDP by a mesh", 2, partial(by_mesh, dp_replicate_size=2)),
    StrategyCase("the documentation's", 2, of_documentation),
    StrategyCase("sharded weights", 2, of_shards),
    StrategyCase("FSDP", 2, sharded),
    StrategyCase("FSDP by name", 2, partial(dict, strategy="fsdp")),
    StrategyCase("FSDP with complete files", 2, partial(sharded, state_dict_type="FULL_STATE_DICT")),
    StrategyCase("FSDP on one process", 1, sharded),
    StrategyCase(
        "FSDP offloaded, activations recomputed",
        2,
        partial(
            sharded,
            cpu_offload=True,
            activation_checkpointing=True,
            auto_wrap_policy="SIZE_BASED_WRAP",
            min_num_params=20,
        ),
    ),
    StrategyCase("DDP on 4", 4),
    StrategyCase("FSDP on 4", 4, sharded),
    StrategyCase("HSDP on 4", 4, partial(by_mesh, dp_replicate_size=2, dp_shard_size=2)),
)


def net() -> nn.Module:
    """A network with a weight that does not learn; its numbers are equal also where several threads make one."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3, generator=generator)
    model[0].bias.requires_grad_(False)
    return model


def parts() -> tuple[nn.Module, torch.optim.Optimizer, Any, DataLoader[Any]]:
    """The objects of the training, equal at every call."""
    model = net()
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.2, momentum=0.9)
    inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=BATCH)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7), loader


def by_hand() -> Weights:
    """The weights after the same training with nothing but PyTorch, in one process."""
    model, optimizer, schedule, loader = parts()
    for number, (batch, targets) in enumerate(islice(_endless(loader), MICRO_STEPS), 1):
        (nn.functional.mse_loss(model(batch), targets) / ACCUMULATION).backward()
        if number % ACCUMULATION == 0:
            nn.utils.clip_grad_norm_(model.parameters(), MOST)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return _flat(model.state_dict())


def trained(folder: str, arguments: Callable[[], dict[str, Any]]) -> Weights:
    """
    The weights after the training on this rank: in its middle it is saved, and goes on with objects that are made anew.

    The batch of all ranks together is the same on any number of them.
    """
    train(folder, arguments, SAVED_AFTER)
    return train(folder, arguments, MICRO_STEPS - SAVED_AFTER, resumes=True)


def train(folder: str, arguments: Callable[[], dict[str, Any]], count: int, resumes: bool = False) -> Weights:
    """The weights after so many micro-steps from the beginning, with a checkpoint at their end, or from such a checkpoint on."""
    options = {"cpu": True, **arguments()}
    accelerator = Accelerator(split_batches=True, gradient_accumulation_steps=ACCUMULATION, **options)
    model, optimizer, schedule, loader = parts()
    # objects may come in any order
    optimizer, loader, model, schedule = accelerator.prepare(optimizer, loader, model, schedule)
    if resumes:
        accelerator.load_state(folder)
    for number, (batch, targets) in enumerate(islice(_endless(loader), count), 1):
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(batch), targets))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), MOST)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if number == count and not resumes:
            # while the loader is read: it goes on from here
            accelerator.save_state(folder)
    # complete weights are the main process's where others have parts
    weights = _flat(accelerator.get_state_dict(model))
    accelerator.end_training()
    return weights


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _flat(state: Mapping[str, torch.Tensor]) -> Weights:
    return [tensor.cpu().flatten().tolist() for tensor in state.values()]


def difference(found: Sequence[Weights]) -> float:
    """The largest difference of any weight on any rank from one process by hand."""
    wanted = by_hand()
    return max(
        (torch.tensor(weight) - torch.tensor(other)).abs().max().item()
        for weights in filter(None, found)
        for weight, other in zip(weights, wanted, strict=True)
    )
