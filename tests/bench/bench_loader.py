"""What one batch costs: hand-written PyTorch, this package and Hugging Face Accelerate side by side, interleaved in one run."""

import gc
import os
import warnings
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from accelerate_nb.reports.text_format import counted
from accelerate_nb.runtime.world.registry import current_world
from tests.bench.rows import Row, compared, in_turns, print_rows, read_arguments, timed
from tests.ranks import run_on_ranks

BATCHES = 300
SIZE = 8
Epoch = Callable[[], None]


def main() -> None:
    """Measure with one process and with two, and print what was found."""
    single = {"action": "store_true", "help": "one process only"}
    arguments, load = read_arguments(__doc__, rounds=9, single=single), os.getloadavg()[0]
    rows = measure(arguments.rounds)
    if not arguments.single:
        rows += run_on_ranks(measure, 2, arguments.rounds, limit=120 + 20 * arguments.rounds)[0]
    print_rows(rows, load, as_json=arguments.json)


def measure(rounds: int) -> list[Row]:
    """The median time of a batch of each loader, for each way of reading."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    current_world()  # connects the processes, which all loaders then find connected
    return [row for way in ("sharded", "dispatched") for row in of_way(way, rounds)]


def of_way(way: str, rounds: int) -> list[Row]:
    """The rows of one way of reading: microseconds a batch."""
    loaders = {"hand-written": hand_written(way), "accelerate_nb": ours(way), "Accelerate": hugging_face(way)}
    for loader in loaders.values():
        assert sum(1 for _ in loader) == BATCHES
    gc.collect()
    gc.disable()
    meet = dist.barrier if dist.is_initialized() else int
    taken = in_turns(
        {name: partial(timed, partial(deque, loader, 0), before=meet) for name, loader in loaders.items()}, rounds
    )
    gc.enable()
    return compared(taken, "hand-written", "µs", f"{counted(processes(), 'rank')}, {way}: {{}}", 1e6 / BATCHES)


def processes() -> int:
    """How many processes read."""
    return dist.get_world_size() if dist.is_initialized() else 1


def data() -> TensorDataset:
    """Small rows, so that what is measured is everything else."""
    length = BATCHES * SIZE * processes()
    return TensorDataset(torch.zeros(length, 8), torch.zeros(length, 1))


def plain() -> DataLoader[Any]:
    """A loader as it is before it is prepared."""
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
    """The loader as one writes it with nothing but PyTorch."""
    if processes() == 1:
        return plain()
    if way == "dispatched":
        return Received(plain())
    return DataLoader(data(), batch_size=SIZE, sampler=DistributedSampler(data(), shuffle=False))


def ours(way: str) -> Any:
    """The loader of this package."""
    from accelerate_nb import Accelerator
    from accelerate_nb.utils import DataLoaderConfiguration

    config = DataLoaderConfiguration(dispatch_batches=way == "dispatched")
    return Accelerator(dataloader_config=config).prepare(plain())


def hugging_face(way: str) -> Any:
    """The loader of Hugging Face Accelerate, which wants to be told that it runs on CPUs."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    config = DataLoaderConfiguration(dispatch_batches=way == "dispatched")
    return Accelerator(cpu=True, dataloader_config=config).prepare(plain())


if __name__ == "__main__":
    main()
