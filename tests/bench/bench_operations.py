"""What one operation between processes costs: ours, Hugging Face Accelerate's and bare `torch.distributed` side by side."""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from accelerate_nb.runtime.world.registry import current_world
from tests.bench.rows import Row, print_rows
from tests.ranks import run_on_ranks

Call = Callable[[], object]
SIZES = {"64 B": 16, "64 KB": 16 << 10, "1 MB": 256 << 10, "16 MB": 4 << 20}
# How long the calls of one turn are together, about, in microseconds: many of a short one, few of a long one.
TURN = 4000.0
OURS, THEIRS, BARE = "accelerate_nb", "Accelerate", "bare"


def main() -> None:
    """Measure on as many processes as asked for, and print what was found."""
    arguments = read_arguments()
    load = os.getloadavg()[0]
    rows: list[Row] = []
    for processes in arguments.processes:
        rows += run_on_ranks(measure, processes, arguments.rounds, arguments.only, limit=3600)[0]
    print_rows(rows, load, as_json=arguments.json)


def read_arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="how often each way has its turn")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--only", default="", help="operations whose name holds this")
    parser.add_argument("--json", action="store_true", help="print numbers for a program")
    return parser.parse_args()


def measure(rounds: int, only: str) -> list[Row]:
    """The median time of a call of each operation, and that of its ratios to Accelerate's in the same round."""
    torch.set_num_threads(1)
    # connects the processes, which all three ways then find connected
    device = current_world().device
    import accelerate.utils as their_operations
    from accelerate import Accelerator as Theirs

    import accelerate_nb.utils as our_operations
    from accelerate_nb import Accelerator as Ours

    ours, theirs = Ours(), Theirs(cpu=device.type == "cpu")
    packages = {
        OURS: ways(ours, our_operations, device),
        THEIRS: ways(theirs, their_operations, device),
        BARE: bare(device),
    }
    gc.collect()
    gc.disable()
    rows = [
        row
        for operation in packages[THEIRS]
        if only in operation
        for row in compared(operation, {way: calls[operation] for way, calls in packages.items()}, rounds)
    ]
    gc.enable()
    return rows


def compared(operation: str, ways: dict[str, Call], rounds: int) -> list[Row]:
    """One operation, all ways in turn."""
    names = list(ways)
    for name in names:
        ways[name]()
    count = agreed_count(ways[BARE])
    taken: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            call = ways[name]
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(count):
                call()
            finish()
            taken[name].append((time.perf_counter() - begin) / count * 1e6)
    rows = []
    for name in names:
        # a turn is compared with that of Accelerate in the same round: what slows the machine for a while slows both
        ratio = statistics.median(mine / other for mine, other in zip(taken[name], taken[THEIRS], strict=True))
        label = f"{dist.get_world_size()} ranks, {operation}: {name}"
        beside = () if name == THEIRS else (ratio, THEIRS)
        rows.append(Row(label, statistics.median(taken[name]), "µs", *beside))
    return rows


def finish() -> None:
    """Wait until a GPU has done everything."""
    if current_world().device.type == "cuda":
        torch.cuda.synchronize()


def agreed_count(call: Call) -> int:
    """How many calls make a turn, the same number on every process."""
    begin = time.perf_counter()
    for _ in range(3):
        call()
    finish()
    count = torch.tensor(max(1, int(TURN / ((time.perf_counter() - begin) / 3 * 1e6))), device=current_world().device)
    dist.broadcast(count, 0)
    return int(count)


def ways(accelerator: Any, operations: Any, device: torch.device) -> dict[str, Call]:
    """The calls that both packages know."""
    calls: dict[str, Call] = {}
    for name, count in SIZES.items():
        tensor = torch.ones(count, device=device)
        text = ["x" * 4 * count]
        # every rank has another length
        ragged = torch.ones(count - accelerator.process_index, device=device)
        calls[f"gather {name}"] = lambda tensor=tensor: accelerator.gather(tensor)
        calls[f"reduce {name}"] = lambda tensor=tensor: accelerator.reduce(tensor, "mean")
        calls[f"broadcast {name}"] = lambda tensor=tensor: operations.broadcast(tensor)
        calls[f"gather_object {name}"] = lambda text=text: operations.gather_object(text)
        calls[f"broadcast_object_list {name}"] = lambda text=text: operations.broadcast_object_list(text)
        calls[f"pad_across_processes {name}"] = lambda ragged=ragged: accelerator.pad_across_processes(ragged)
    metrics = (torch.ones(32, 10, device=device), torch.ones(32, dtype=torch.int64, device=device))
    calls["gather_for_metrics"] = lambda: accelerator.gather_for_metrics(metrics)
    return calls


def bare(device: torch.device) -> dict[str, Call]:
    """The calls as one writes them with nothing but PyTorch."""
    size = dist.get_world_size()

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(tensor) for _ in range(size)]
        dist.all_gather(parts, tensor)
        return torch.cat(parts)

    def mean(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        dist.all_reduce(copy)
        return copy / size

    def broadcast(tensor: torch.Tensor) -> torch.Tensor:
        received = tensor.clone()
        dist.broadcast(received, 0)
        return received

    def pad(tensor: torch.Tensor) -> torch.Tensor:
        longest = int(gather(torch.tensor([len(tensor)], device=device)).max())
        return torch.nn.functional.pad(tensor, (0, longest - len(tensor)))

    calls: dict[str, Call] = {}
    for name, count in SIZES.items():
        tensor = torch.ones(count, device=device)
        text = ["x" * 4 * count]
        ragged = torch.ones(count - dist.get_rank(), device=device)
        calls[f"gather {name}"] = lambda tensor=tensor: gather(tensor)
        calls[f"reduce {name}"] = lambda tensor=tensor: mean(tensor)
        calls[f"broadcast {name}"] = lambda tensor=tensor: broadcast(tensor)
        calls[f"gather_object {name}"] = lambda text=text: dist.all_gather_object([None] * size, text)
        calls[f"broadcast_object_list {name}"] = lambda text=text: dist.broadcast_object_list(text, 0)
        calls[f"pad_across_processes {name}"] = lambda ragged=ragged: pad(ragged)
    metrics = (torch.ones(32, 10, device=device), torch.ones(32, dtype=torch.int64, device=device))
    calls["gather_for_metrics"] = lambda: [gather(metric) for metric in metrics]
    return calls


if __name__ == "__main__":
    main()
