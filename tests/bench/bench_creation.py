"""What creating an `Accelerator` costs: ours and Hugging Face's side by side, the first in a process and the following ones."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

import torch.distributed as dist

from tests.ranks import run_on_ranks

FOLLOWING = 50
PACKAGES = ("accelerate_nb", "accelerate")


@dataclass(frozen=True)
class Row:
    """One package: microseconds for the first `Accelerator` of a process and for one of the following, over all rounds."""

    name: str
    processes: int
    first: float
    first_fastest: float
    following: float
    following_fastest: float


def main() -> None:
    """Measure with one process and with two, and print what was found."""
    arguments = read_arguments()
    rows = [row for processes in (1, 2) for row in measure(processes, arguments.rounds)]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    print(f"{'processes':>9}  {'package':<14} {'first µs':>9} {'(fastest)':>10} {'following µs':>13} {'(fastest)':>10}")
    for row in rows:
        print(
            f"{row.processes:>9}  {row.name:<14} {row.first:>9.0f} {row.first_fastest:>10.0f} {row.following:>13.1f} "
            f"{row.following_fastest:>10.1f}"
        )


def read_arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="how many processes each package gets; they take turns")
    parser.add_argument("--json", action="store_true", help="print numbers for a program")
    return parser.parse_args()


def measure(processes: int, rounds: int) -> list[Row]:
    """Each round starts new processes for either package, the one that comes first in turn; rank 0 tells the times."""
    times: dict[str, list[tuple[float, list[float]]]] = {name: [] for name in PACKAGES}
    for turn in range(rounds):
        for name in PACKAGES[turn % 2 :] + PACKAGES[: turn % 2]:
            times[name].append(run_on_ranks(created, processes, name)[0])
    return [
        Row(
            name,
            processes,
            statistics.median(first for first, _ in durations),
            min(first for first, _ in durations),
            statistics.median(statistics.median(following) for _, following in durations),
            min(min(following) for _, following in durations),
        )
        for name, durations in times.items()
    ]


def created(package: str) -> tuple[float, list[float]]:
    """How long the first `Accelerator` took, which connects the processes, and each of those that followed."""
    accelerator: Any = import_module(package).Accelerator
    first = taken(accelerator)
    if dist.is_initialized():
        dist.barrier()
    return first, [taken(accelerator) for _ in range(FOLLOWING)]


def taken(accelerator: Callable[..., Any]) -> float:
    """Microseconds of one creation."""
    begin = time.perf_counter()
    accelerator(cpu=True)
    return (time.perf_counter() - begin) * 1e6


if __name__ == "__main__":
    main()
