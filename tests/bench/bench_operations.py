"""What one operation between processes costs: ours, Hugging Face Accelerate's and bare `torch.distributed` side by side."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from accelerate_nb.runtime.world.registry import current_world
from tests.ranks import run_on_ranks

Call = Callable[[], object]
# How long the calls of one turn are together, about, in microseconds: many of a short one, few of a long one.
TURN = 4000.0


@dataclass(frozen=True)
class Row:
    """One operation done one way: microseconds a call, the fastest and the median of all turns, and how bare torch compares."""

    operation: str
    way: str
    processes: int
    fastest: float
    median: float
    ratio: float


def main() -> None:
    """Measure on as many processes as asked for, and print what was found."""
    arguments = read_arguments()
    rows = run_on_ranks(measure, arguments.processes, arguments.rounds, arguments.only, limit=900)[0]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    print(f"{'operation':<26} {'way':<14} {'fastest µs':>11} {'median µs':>10} {'to bare':>8}")
    for row in rows:
        print(f"{row.operation:<26} {row.way:<14} {row.fastest:>11.1f} {row.median:>10.1f} {row.ratio:>8.2f}")


def read_arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="how often each way has its turn")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="", help="operations whose name holds this")
    parser.add_argument("--json", action="store_true", help="print numbers for a program")
    return parser.parse_args()


def measure(rounds: int, only: str) -> list[Row]:
    """The time of a call of each operation; the three ways take turns, so that all meet the same noise."""
    torch.set_num_threads(1)
    # connects the processes, which all three ways then find connected
    device = current_world().device
    import accelerate.utils as their_operations
    from accelerate import Accelerator as Theirs

    import accelerate_nb.utils as our_operations
    from accelerate_nb import Accelerator as Ours

    ours, theirs = Ours(), Theirs(cpu=device.type == "cpu")
    packages = {
        "accelerate_nb": ways(ours, our_operations, device),
        "Accelerate": ways(theirs, their_operations, device),
        "bare": bare(device),
    }
    gc.collect()
    gc.disable()
    rows = [
        row
        for operation in packages["bare"]
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
    count = agreed_count(ways["bare"])
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
    return [
        Row(
            operation,
            name,
            dist.get_world_size(),
            min(taken[name]),
            statistics.median(taken[name]),
            # a turn is compared with that of the bare way in the same round: what slows the machine for a while slows both
            statistics.median(mine / bare for mine, bare in zip(taken[name], taken["bare"], strict=True)),
        )
        for name in names
    ]


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


def inputs(device: torch.device) -> dict[str, Any]:
    """What the operations are given."""
    return {
        "64 B": torch.ones(16, device=device),
        "64 KB": torch.ones(16, 1024, device=device),
        "1 MB": torch.ones(256, 1024, device=device),
        "16 MB": torch.ones(4096, 1024, device=device),
        "metrics": (torch.ones(32, 10, device=device), torch.ones(32, dtype=torch.int64, device=device)),
        "object": [{"loss": 1.0, "words": ["one", "two"]}],
    }


def ways(accelerator: Any, operations: Any, device: torch.device) -> dict[str, Call]:
    """The calls that both packages know."""
    given = inputs(device)
    metrics, payload = given["metrics"], given["object"]
    calls: dict[str, Call] = {}
    for name in ("64 B", "64 KB", "1 MB", "16 MB"):
        tensor = given[name]
        calls[f"gather {name}"] = lambda tensor=tensor: accelerator.gather(tensor)
        calls[f"reduce {name}"] = lambda tensor=tensor: accelerator.reduce(tensor, "mean")
        calls[f"broadcast {name}"] = lambda tensor=tensor: operations.broadcast(tensor)
    calls["pad_across_processes"] = lambda: accelerator.pad_across_processes(metrics[0], dim=1)
    calls["gather_for_metrics"] = lambda: accelerator.gather_for_metrics(metrics)
    calls["gather_object"] = lambda: operations.gather_object(payload)
    calls["broadcast_object_list"] = lambda: operations.broadcast_object_list(payload)
    return calls


def bare(device: torch.device) -> dict[str, Call]:
    """The calls as one writes them with nothing but PyTorch."""
    given = inputs(device)
    size = dist.get_world_size()
    metrics, payload = given["metrics"], given["object"]

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(tensor) for _ in range(size)]
        dist.all_gather(parts, tensor)
        return torch.cat(parts)

    def mean(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        dist.all_reduce(copy)
        return copy / size

    def broadcast(tensor: torch.Tensor) -> None:
        dist.broadcast(tensor, 0)

    def pad() -> torch.Tensor:
        longest = int(gather(torch.tensor([metrics[0].shape[1]], device=device)).max())
        return torch.nn.functional.pad(metrics[0], (0, longest - metrics[0].shape[1]))

    def gather_object() -> None:
        dist.all_gather_object([None] * size, payload)

    calls: dict[str, Call] = {}
    for name in ("64 B", "64 KB", "1 MB", "16 MB"):
        tensor = given[name]
        calls[f"gather {name}"] = lambda tensor=tensor: gather(tensor)
        calls[f"reduce {name}"] = lambda tensor=tensor: mean(tensor)
        calls[f"broadcast {name}"] = lambda tensor=tensor: broadcast(tensor)
    calls["pad_across_processes"] = pad
    calls["gather_for_metrics"] = lambda: [gather(metric) for metric in metrics]
    calls["gather_object"] = gather_object
    calls["broadcast_object_list"] = lambda: dist.broadcast_object_list(payload, 0)
    return dict(sorted(calls.items()))


if __name__ == "__main__":
    main()
