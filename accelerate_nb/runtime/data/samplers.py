"""The order in which samples are taken."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler


class SeedableRandomSampler(RandomSampler):
    """A random order that depends on nothing but a seed and the epoch: `data_seed`, or the seed that torch began with."""

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.random.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = new_generator()
        self.generator.manual_seed(self.epoch + self.initial_seed)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """The next order is that of this epoch."""
        self.epoch = epoch


def new_generator() -> torch.Generator:
    """A generator where tensors are made by default, since torch's samplers make tensors there."""
    return torch.Generator(device=torch.get_default_device())


def drawn_seed(generator: torch.Generator | None = None) -> int:
    """A seed from torch's global generator: the draw that torch's samplers and loaders make, so that equal programs stay in step."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def index_source(dataloader: Any) -> Any:
    """The source of a loader's batches of indices; `sampler` itself may be a batch sampler, with `batch_size=None`."""
    return dataloader.sampler if isinstance(dataloader.sampler, BatchSampler) else dataloader.batch_sampler


def get_sampler(dataloader: Any) -> Any:
    """The sampler of single indices in a loader; `None` where a batch sampler has none."""
    return getattr(index_source(dataloader), "sampler", None)


@contextmanager
def drawn_from(states: Mapping[str, Any]) -> Iterator[None]:
    """A block that draws from former states of the process's generators, where there are any, and leaves the current ones as they are."""
    if "random" not in states:
        yield
        return
    current = random_states()
    _set_random_states(states)
    try:
        yield
    finally:
        _set_random_states(current)


def random_states() -> dict[str, Any]:
    """The states of the process's generators that samplers draw from."""
    return {"random": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}


def _set_random_states(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["random"])
    if "python" in states:  # positions of former versions have none
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
