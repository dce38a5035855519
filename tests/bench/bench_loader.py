"""What one batch costs: hand-written PyTorch, this package and Hugging Face Accelerate side by side, interleaved in one run."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from accelerate_nb.runtime.world.registry import current_world
from tests.ranks import run_on_ranks

BATCHES = 300
SIZE = 8
Epoch = Callable[[], None]


@dataclass(frozen=True)
class Row:
    """One way to read: microseconds a batch (median of the rounds), and what it adds to the hand-written way."""

    way: str
    name: str
    processes: int
    microseconds: float
    added: float
    ratio: float


class Stream(IterableDataset[Any]):
    """The rows of a data set, one after the other."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return (self.data[index] for index in range(len(self.data)))


def main() -> None:
    """Measure with one process and with two, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="how often each loader is read; they take turns")
    parser.add_argument("--single", action="store_true", help="one process only")
    parser.add_argument("--json", action="store_true", help="print numbers for a program")
    arguments = parser.parse_args()
    rows = measure(arguments.rounds)
    if not arguments.single:
        rows += run_on_ranks(measure, 2, arguments.rounds, limit=120 + 20 * arguments.rounds)[0]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    print(f"{'processes':>9}  {'read':<14} {'loader':<14} {'µs a batch':>10} {'added µs':>9} {'ratio':>6}")
    for row in rows:
        print(
            f"{row.processes:>9}  {row.way:<14} {row.name:<14} {row.microseconds:>10.1f} {row.added:>9.1f} {row.ratio:>6.2f}"
        )


def measure(rounds: int) -> list[Row]:
    """The median time of a batch of each loader, for each way of reading."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    current_world()  # connects the processes, which all loaders then find connected
    return [row for way in ("sharded", "stream", "dispatched") for row in of_way(way, rounds)]


def of_way(way: str, rounds: int) -> list[Row]:
    """The rows of one way of reading; the loaders take turns, so that all meet the same noise."""
    loaders = {"hand-written": hand_written(way), "accelerate_nb": ours(way), "Accelerate": hugging_face(way)}
    names = list(loaders)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        read(loaders[name])
    gc.collect()
    gc.disable()
    for turn in range(rounds):
        for name in names[turn % 3 :] + names[: turn % 3]:
            if dist.is_initialized():
                dist.barrier()
            begin = time.perf_counter()
            count = read(loaders[name])
            taken[name].append((time.perf_counter() - begin) / count * 1e6)
    gc.enable()
    hand = taken[names[0]]
    return [
        Row(
            way,
            name,
            processes(),
            statistics.median(taken[name]),
            statistics.median(mine - other for mine, other in zip(taken[name], hand, strict=True)),
            statistics.median(mine / other for mine, other in zip(taken[name], hand, strict=True)),
        )
        for name in names
    ]


def read(loader: Any) -> int:
    """How many batches there are, once all have been read."""
    return sum(1 for _ in loader)


def processes() -> int:
    """How many processes read."""
    return dist.get_world_size() if dist.is_initialized() else 1


def data() -> TensorDataset:
    """Small rows, so that what is measured is everything else."""
    length = BATCHES * SIZE * processes()
    return TensorDataset(torch.zeros(length, 8), torch.zeros(length, 1))


def plain(way: str) -> DataLoader[Any]:
    """A loader as it is before it is prepared."""
    return DataLoader(Stream(data()) if way == "stream" else data(), batch_size=SIZE)


class Received:
    """Batches that rank 0 reads and sends, each as one tensor a leaf: the least that dispatching can do."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Any:
        rank, size = dist.get_rank(), dist.get_world_size()
        rows = SIZE * size
        batches = iter(DataLoader(self.loader.dataset, batch_size=rows))
        for _ in range(BATCHES):
            parts = next(batches) if rank == 0 else [torch.empty(rows, 8), torch.empty(rows, 1)]
            for part in parts:
                dist.broadcast(part, src=0)
            yield [part[rank * SIZE : (rank + 1) * SIZE] for part in parts]


def hand_written(way: str) -> Any:
    """The loader as one writes it with nothing but PyTorch."""
    if processes() == 1:
        return plain(way)
    if way == "dispatched":
        return Received(plain(way))
    if way == "stream":
        return DataLoader(Dealt(data()), batch_size=SIZE)
    return DataLoader(data(), batch_size=SIZE, sampler=DistributedSampler(data(), shuffle=False))


class Dealt(Stream):
    """A process's own rows of a stream, of which it reads all."""

    def __iter__(self) -> Any:
        rank, size = dist.get_rank(), dist.get_world_size()
        return (row for index, row in enumerate(super().__iter__()) if index // SIZE % size == rank)


def ours(way: str) -> Any:
    """The loader of this package."""
    from accelerate_nb import Accelerator
    from accelerate_nb.utils import DataLoaderConfiguration

    config = DataLoaderConfiguration(dispatch_batches=way == "dispatched")
    return Accelerator(dataloader_config=config).prepare(plain(way))


def hugging_face(way: str) -> Any:
    """The loader of Hugging Face Accelerate, which wants to be told that it runs on CPUs."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    config = DataLoaderConfiguration(dispatch_batches=way == "dispatched")
    return Accelerator(cpu=True, dataloader_config=config).prepare(plain(way))


if __name__ == "__main__":
    main()
