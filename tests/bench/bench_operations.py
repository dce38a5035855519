"""What one operation between processes costs: ours and Hugging Face Accelerate's side by side."""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from accelerate_nb.runtime.world.registry import current_world
from tests.bench.rows import Row, compared, finish, in_turns, main, timed, without_collector
from tests.ranks import run_on_ranks

Call = Callable[[], object]
SIZES = {"64 B": 16, "64 KB": 16 << 10, "1 MB": 256 << 10, "16 MB": 4 << 20}
# How long the calls of one turn are together, about, in microseconds: many of a short one, few of a long one.
TURN = 4000.0
OURS, THEIRS = "accelerate_nb", "Accelerate"


FLAGS: dict[str, Any] = {
    "processes": {"type": int, "nargs": "+", "default": [2, 4]},
    "only": {"default": "", "help": "operations whose name holds this"},
}


def on_ranks(given: argparse.Namespace) -> list[Row]:
    each = (run_on_ranks(measure, size, given.rounds, given.only, limit=3600)[0] for size in given.processes)
    return [row for rows in each for row in rows]


def measure(rounds: int, only: str) -> list[Row]:
    """The median time of a call of each operation, and that of its ratios to Accelerate's in the same round."""
    torch.set_num_threads(1)
    # connects the processes, which both packages then find connected
    device = current_world().device
    import accelerate.utils as their_operations
    from accelerate import Accelerator as Theirs

    import accelerate_nb.utils as our_operations
    from accelerate_nb import Accelerator as Ours

    ours, theirs = Ours(), Theirs(cpu=device.type == "cpu")
    packages = {OURS: ways(ours, our_operations, device), THEIRS: ways(theirs, their_operations, device)}
    rows = []
    with without_collector():
        for operation in (name for name in packages[THEIRS] if only in name):
            calls = {way: several[operation] for way, several in packages.items()}
            for call in calls.values():
                call()
            count = agreed_count(calls[THEIRS])
            ways_ = {way: partial(timed, call, count, before=dist.barrier, after=finish) for way, call in calls.items()}
            what = f"{dist.get_world_size()} ranks, {operation}: {{}}"
            rows += compared(in_turns(ways_, rounds), THEIRS, "µs", what, 1e6)
    return rows


def agreed_count(call: Call) -> int:
    """How many calls make a turn, the same number on every process."""
    microseconds = timed(call, 3, after=finish) * 1e6
    count = torch.tensor(max(1, int(TURN / microseconds)), device=current_world().device)
    dist.broadcast(count, 0)
    return int(count)


def ways(accelerator: Any, package: Any, device: torch.device) -> dict[str, Call]:
    """The calls that both packages know, with a tensor or a text on every rank, in each size."""
    calls: dict[str, Call] = {}
    for name, count in SIZES.items():
        tensor, text = torch.ones(count, device=device), ["x" * 4 * count]
        calls |= {
            f"gather {name}": partial(accelerator.gather, tensor),
            f"reduce {name}": partial(accelerator.reduce, tensor, "mean"),
            f"broadcast {name}": partial(package.broadcast, tensor),
            f"gather_object {name}": partial(package.gather_object, text),
            f"broadcast_object_list {name}": partial(package.broadcast_object_list, text),
        }
    metrics = (torch.ones(32, 10, device=device), torch.ones(32, dtype=torch.int64, device=device))
    return {**calls, "gather_for_metrics": partial(accelerator.gather_for_metrics, metrics)}


if __name__ == "__main__":
    main(on_ranks, __doc__, 40, **FLAGS)
