"""What a collective operation costs beside bare `torch.distributed`, by size and by number of ranks."""

from __future__ import annotations

import argparse
import gc
import os
from functools import partial

import torch
import torch.distributed as dist

from accelerate_nb.runtime.world.registry import current_world
from tests.bench.bench_operations import Call, compared
from tests.bench.rows import Row, print_rows
from tests.ranks import run_on_ranks

SIZES = {"64 B": 16, "64 KB": 16 << 10, "1 MB": 256 << 10, "16 MB": 4 << 20}


def main() -> None:
    """Measure on each number of ranks, and print what was found."""
    arguments = read_arguments()
    load = os.getloadavg()[0]
    rows: list[Row] = []
    for processes in arguments.processes:
        rows += run_on_ranks(measure, processes, arguments.rounds, arguments.sizes, arguments.only, limit=1800)[0]
    print_rows(rows, load, as_json=arguments.json)


def read_arguments() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="how often each way has its turn")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--only", default="", help="operations whose name holds this")
    parser.add_argument("--json", action="store_true", help="print numbers for a program")
    return parser.parse_args()


def measure(rounds: int, sizes: list[str], only: str) -> list[Row]:
    """The median time of each operation, and the median of its ratios to the bare one in the same round."""
    torch.set_num_threads(1)
    current_world()  # connects the ranks
    rows = []
    gc.collect()
    gc.disable()
    for size in sizes:
        for operation, ways in operations(torch.ones(SIZES[size])).items():
            if only in operation:
                rows += [
                    Row(
                        f"{found.processes} ranks, {operation} {size}: {found.way}",
                        found.median,
                        "µs",
                        *((found.ratio, "bare") if found.way != "bare" else ()),
                    )
                    for found in compared(f"{operation} {size}", ways, rounds)
                ]
    gc.enable()
    return rows


def operations(tensor: torch.Tensor) -> dict[str, dict[str, Call]]:
    """Each operation in all its ways, of which each gives a new tensor, but for broadcasts in place."""
    import accelerate_nb.utils as ours

    def gather() -> torch.Tensor:
        gathered = tensor.new_empty(dist.get_world_size() * len(tensor))
        dist.all_gather_into_tensor(gathered, tensor)
        return gathered

    def reduce() -> torch.Tensor:
        reduced = tensor.clone()
        dist.all_reduce(reduced)
        return reduced

    def broadcast() -> torch.Tensor:
        received = tensor.clone()
        dist.broadcast(received, 0)
        return received

    return {
        "gather": {"bare": gather, "accelerate_nb": partial(ours.gather, tensor)},
        "reduce": {"bare": reduce, "accelerate_nb": partial(ours.reduce, tensor, "sum")},
        "broadcast": {
            "bare": partial(dist.broadcast, tensor, 0),
            "bare, into a copy": broadcast,
            "accelerate_nb": partial(ours.broadcast, tensor),
        },
    }


if __name__ == "__main__":
    main()
