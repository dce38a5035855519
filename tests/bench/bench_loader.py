"""What one batch costs: hand-written PyTorch, this package and Hugging Face Accelerate side by side, interleaved in one run."""

import warnings
from collections import deque
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from accelerate_nb.reports.text_format import counted
from accelerate_nb.runtime.world.registry import current_world
from tests.bench.rows import SINGLE, Row, compared, in_turns, main, on_one_and_two, timed, together, without_collector

BATCHES = 300
SIZE = 8


def measure(rounds: int) -> list[Row]:
    """The median time of a batch of each loader, for each way of reading."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    current_world()  # connects the processes, which all loaders then find connected
    return [row for way in ("sharded", "dispatched") for row in of_way(way, rounds)]


def of_way(way: str, rounds: int) -> list[Row]:
    loaders = {
        "hand-written": hand_written(way),
        "accelerate_nb": prepared("accelerate_nb", way),
        "Accelerate": prepared("accelerate", way),
    }
    for loader in loaders.values():
        assert sum(1 for _ in loader) == BATCHES
    ways = {name: partial(timed, partial(deque, loader, 0), before=together) for name, loader in loaders.items()}
    with without_collector():
        taken = in_turns(ways, rounds)
    return compared(taken, "hand-written", "µs", f"{counted(processes(), 'rank')}, {way}: {{}}", 1e6 / BATCHES)


def processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def data() -> TensorDataset:
    """Small rows, so that what is measured is everything else."""
    length = BATCHES * SIZE * processes()
    return TensorDataset(torch.zeros(length, 8), torch.zeros(length, 1))


def plain() -> DataLoader[Any]:
    return DataLoader(data(), batch_size=SIZE)


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
    if processes() == 1:
        return plain()
    if way == "dispatched":
        return Received(plain())
    return DataLoader(data(), batch_size=SIZE, sampler=DistributedSampler(data(), shuffle=False))


def prepared(package: str, way: str) -> Any:
    config = import_module(f"{package}.utils").DataLoaderConfiguration(dispatch_batches=way == "dispatched")
    return import_module(package).Accelerator(cpu=True, dataloader_config=config).prepare(plain())


if __name__ == "__main__":
    main(partial(on_one_and_two, measure), __doc__, 9, single=SINGLE)
