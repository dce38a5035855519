"""What one operation between processes costs: ours, Hugging Face Accelerate's and bare `torch.distributed` side by side."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from accelerate_nb.runtime.world.registry import current_world
from tests.bench.rows import Row, compared, in_turns, print_rows, read_arguments, timed
from tests.ranks import run_on_ranks

Call = Callable[[], object]
SIZES = {"64 B": 16, "64 KB": 16 << 10, "1 MB": 256 << 10, "16 MB": 4 << 20}
# How long the calls of one turn are together, about, in microseconds: many of a short one, few of a long one.
TURN = 4000.0
OURS, THEIRS, BARE = "accelerate_nb", "Accelerate", "bare"


def main() -> None:
    """Measure on as many processes as asked for, and print what was found."""
    flags = {
        "processes": {"type": int, "nargs": "+", "default": [2, 4]},
        "only": {"default": "", "help": "operations whose name holds this"},
    }
    arguments, load = read_arguments(__doc__, rounds=40, **flags), os.getloadavg()[0]
    rows: list[Row] = []
    for processes in arguments.processes:
        rows += run_on_ranks(measure, processes, arguments.rounds, arguments.only, limit=3600)[0]
    print_rows(rows, load, as_json=arguments.json)


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
    rows = []
    for operation in packages[THEIRS]:
        if only in operation:
            calls = {way: several[operation] for way, several in packages.items()}
            for call in calls.values():
                call()
            count = agreed_count(calls[BARE])
            ways_ = {way: partial(timed, call, count, before=dist.barrier, after=finish) for way, call in calls.items()}
            what = f"{dist.get_world_size()} ranks, {operation}: {{}}"
            rows += compared(in_turns(ways_, rounds), THEIRS, "µs", what, 1e6)
    gc.enable()
    return rows


def finish() -> None:
    """Wait until a GPU has done everything."""
    if current_world().device.type == "cuda":
        torch.cuda.synchronize()


def agreed_count(call: Call) -> int:
    """How many calls make a turn, the same number on every process."""
    microseconds = timed(call, 3, after=finish) * 1e6
    count = torch.tensor(max(1, int(TURN / microseconds)), device=current_world().device)
    dist.broadcast(count, 0)
    return int(count)


def calls_of(device: torch.device, operations: dict[str, Callable[[Any], object]]) -> dict[str, Call]:
    """Each operation with a tensor, texts or a tensor of another length on every rank, in each size."""
    calls: dict[str, Call] = {}
    for name, count in SIZES.items():
        tensor = torch.ones(count, device=device)
        given: dict[str, Any] = {
            "gather": tensor,
            "reduce": tensor,
            "broadcast": tensor,
            "gather_object": ["x" * 4 * count],
            "broadcast_object_list": ["x" * 4 * count],
            "pad_across_processes": torch.ones(count - dist.get_rank(), device=device),
        }
        calls |= {f"{operation} {name}": partial(operations[operation], value) for operation, value in given.items()}
    metrics = (torch.ones(32, 10, device=device), torch.ones(32, dtype=torch.int64, device=device))
    calls["gather_for_metrics"] = partial(operations["gather_for_metrics"], metrics)
    return calls


def ways(accelerator: Any, package: Any, device: torch.device) -> dict[str, Call]:
    """The calls that both packages know."""
    of_package = {name: getattr(package, name) for name in ("broadcast", "gather_object", "broadcast_object_list")}
    of_accelerator = {
        name: getattr(accelerator, name) for name in ("gather", "pad_across_processes", "gather_for_metrics")
    }
    return calls_of(
        device, {**of_package, **of_accelerator, "reduce": lambda tensor: accelerator.reduce(tensor, "mean")}
    )


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

    operations: dict[str, Callable[[Any], object]] = {
        "gather": gather,
        "reduce": mean,
        "broadcast": broadcast,
        "gather_object": lambda text: dist.all_gather_object([None] * size, text),
        "broadcast_object_list": lambda text: dist.broadcast_object_list(text, 0),
        "pad_across_processes": pad,
        "gather_for_metrics": lambda metrics: [gather(metric) for metric in metrics],
    }
    return calls_of(device, operations)


if __name__ == "__main__":
    main()
