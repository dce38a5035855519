"""The data sets that loaders are tested with, and values that can be compared."""

from collections import UserDict
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info


class Numbers(Dataset[Any]):
    """Whole numbers; some are changed by chance as images are augmented."""

    def __init__(self, length: int, kind: str = "plain") -> None:
        self.length = length
        self.kind = kind

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        number = torch.tensor(index)
        if self.kind == "augmented":
            return number + torch.rand(())
        return number


class Stream(IterableDataset[Any]):
    """The same, one after the other; with a length only if it is told."""

    def __init__(self, length: int, kind: str = "plain") -> None:
        self.numbers = Numbers(length, kind)

    def __iter__(self) -> Iterator[Any]:
        return (self.numbers[index] for index in range(len(self.numbers)))


class Sized(Stream):
    """A stream that knows its length."""

    def __len__(self) -> int:
        return len(self.numbers)


class Shuffled(Stream):
    """A stream that is shuffled anew in every epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.from_numpy(np.random.default_rng(self.epoch).permutation(len(self.numbers))))


class OfWorkers(IterableDataset[Any]):
    """A stream of which each worker process reads so many numbers: from 0 on the first, from 100 on the second, and so on."""

    def __init__(self, *counts: int) -> None:
        self.counts = counts

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number = 0 if worker is None else worker.id
        return (torch.tensor(100 * number + index) for index in range(self.counts[number]))

    @property
    def numbers(self) -> list[int]:
        """All numbers."""
        return [100 * number + index for number, count in enumerate(self.counts) for index in range(count)]


class Broken(Stream):
    """A stream that breaks off after its third sample."""

    def __iter__(self) -> Iterator[Any]:
        for index in range(3):
            yield torch.tensor(index)
        raise OSError("the disk is gone")


def plain(batch: Any) -> Any:
    """A batch as plain Python, which can be compared and can travel."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    return [plain(value) for value in batch]


def typed(value: Any) -> Any:
    """A value in plain values: with the type of every container and tensor, and every number as it is."""
    if isinstance(value, torch.Tensor):
        whole = value.detach().to("cpu")
        odd = whole.dtype in (torch.bfloat16, torch.float16)
        numbers = (whole.float() if odd else whole).contiguous().numpy().tobytes()
        return str(value.dtype), tuple(value.shape), value.requires_grad, numbers
    if isinstance(value, (dict, UserDict)):
        return type(value).__name__, [(key, typed(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [typed(item) for item in value]
    if is_dataclass(value):
        return type(value).__name__, [(field.name, typed(getattr(value, field.name))) for field in fields(value)]
    return repr(value)
