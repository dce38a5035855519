"""Over a table of loaders, every process sees and gathers what it does under Hugging Face Accelerate, or what is right."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from tests.peers import Peer, under_both
from tests.runtime.data.loaders import Numbers, Stream


@dataclass(frozen=True)
class Case:
    """One loader, and how it is prepared."""

    kind: str
    length: int
    size: int = 2
    drop: bool = False
    even: bool = True
    split: bool = False
    dispatch: bool | None = None

    @property
    def is_stream(self) -> bool:
        return self.kind.startswith("stream")


class Sized(Stream):
    """A stream that knows its length."""

    def __len__(self) -> int:
        return len(self.numbers)


class Batches:
    """Batches of one, two, one, two ... indices, as somebody wrote them."""

    def __init__(self, length: int) -> None:
        self.found: list[list[int]] = []
        rest = list(range(length))
        while rest:
            count = 1 + len(self.found) % 2
            self.found.append(rest[:count])
            rest = rest[count:]

    def __iter__(self) -> Any:
        return iter([list(batch) for batch in self.found])

    def __len__(self) -> int:
        return len(self.found)


def loader(case: Case) -> DataLoader[Any]:
    """The loader of a case as it is before it is prepared."""
    data = Numbers(case.length)
    match case.kind:
        case "shuffled":
            return DataLoader(data, case.size, drop_last=case.drop, shuffle=True)
        case "batch sampler":
            return DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), case.size, case.drop))
        case "sampler of batches":
            sampler = BatchSampler(SequentialSampler(data), case.size, case.drop)
            return DataLoader(List(case.length), sampler=sampler, batch_size=None)
        case "batches of any size":
            return DataLoader(data, batch_sampler=Batches(case.length))
        case "stream":
            return DataLoader(Stream(case.length), case.size, drop_last=case.drop)
        case "stream with a length":
            return DataLoader(Sized(case.length), case.size, drop_last=case.drop)
    return DataLoader(data, case.size, drop_last=case.drop)


class List(Numbers):
    """Numbers of which several are taken at once."""

    def __getitem__(self, index: Any) -> Any:
        return torch.tensor(index)


def told(ask: Any) -> Any:
    """What was said, or which kind of error was raised."""
    try:
        return ask()
    except (TypeError, AttributeError, ValueError, RuntimeError) as error:
        return next(kind.__name__ for kind in (TypeError, AttributeError, ValueError, RuntimeError) if isinstance(error, kind))


def seen(peer: Peer, cases: list[Case]) -> list[dict[str, Any]]:
    """Two epochs of each case, with what the loader says of itself."""
    warnings.simplefilter("ignore")
    found = []
    for case in cases:
        torch.manual_seed(4)
        config = peer.door("utils").DataLoaderConfiguration(
            split_batches=case.split, even_batches=case.even, dispatch_batches=case.dispatch
        )
        accelerator = peer.Accelerator(dataloader_config=config)
        prepared = accelerator.prepare(loader(case))
        said: dict[str, Any] = {"batches": [], "ends": [], "remainders": [], "gathered": []}
        for name in ("total_batch_size", "total_dataset_length"):
            said[name] = told(lambda name=name: getattr(prepared, name))
        said["len"] = told(lambda: len(prepared))
        for _ in range(2):
            for batch in prepared:
                said["batches"].append(batch.tolist())
                said["ends"].append(prepared.end_of_dataloader)
                said["remainders"].append(prepared.remainder)
                if case.even and case.kind != "batches of any size":
                    said["gathered"] += accelerator.gather_for_metrics(batch).tolist()
                else:
                    said["gathered"] += accelerator.gather_for_metrics(batch.tolist())
        found.append(said)
    return found


LENGTHS = [1, 2, 3, 4, 5, 8, 9]
SHARDED = [
    Case(kind, length, 2, drop, even, split, False)
    for kind, length, drop, even, split in product(
        ["plain", "shuffled", "batch sampler", "sampler of batches"], LENGTHS, *[[False, True]] * 3
    )
]
