"""What benchmarks share: their arguments, ways that take turns, waiting for each other, and the table of what was found."""

import argparse
import gc
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tests.ranks import run_on_ranks

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One measurement: the median of its rounds, and its ratio to what it is compared with."""

    name: str
    value: float
    unit: str
    ratio: float | None = None
    beside: str = ""


def main(
    measure: Callable[[argparse.Namespace], Sequence[Row]],
    about: str | None,
    rounds: int | None,
    *,
    decimals: int = 2,
    note: str = "",
    **flags: Mapping[str, Any],
) -> None:
    """Measure what a command line asks for, and print what was found, with a `note` about it."""
    parser = argparse.ArgumentParser(description=about)
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help="how often each way is taken; they take turns")
    for name, details in flags.items():
        parser.add_argument(f"--{name}", **details)
    arguments = parser.parse_args()
    # what is measured is the work, not the threads of one process
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    load = os.getloadavg()[0]
    if rows := measure(arguments):
        print_rows(rows, load, note, decimals)


SINGLE: dict[str, Any] = {"action": "store_true", "help": "one process only"}


def on_one_and_two(measure: Callable[..., list[Row]], arguments: argparse.Namespace, *more: Any) -> list[Row]:
    """The rows of this process, and, unless there is to be a single one, those of two ranks."""
    rows = measure(arguments.rounds, *more)
    if not arguments.single:
        rows += run_on_ranks(measure, 2, arguments.rounds, *more, limit=120 + 20 * arguments.rounds)[0]
    return rows


def on_gpus_or_tiny(
    measure: Callable[[argparse.Namespace], Sequence[Row]], arguments: argparse.Namespace
) -> Sequence[Row]:
    """The rows, where there is a GPU, or tiny models are asked for."""
    if arguments.tiny or torch.cuda.is_available():
        return measure(arguments)
    print("no CUDA GPU here: nothing measured (--tiny tries the loops on the CPU)")
    return []


def finish() -> None:
    """Wait until GPUs have done what they were given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def together() -> None:
    """Wait until all processes are here, and their GPUs have done what they were given."""
    finish()
    if dist.is_initialized():
        dist.barrier()


@contextmanager
def without_collector() -> Iterator[None]:
    """Inside the block Python looks for no garbage."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def in_turns(ways: Mapping[str, Callable[[], T]], rounds: int, *, until: float = math.inf) -> dict[str, list[T]]:
    """What each way gives in each round, of which a third or later one begins no more after a moment of the monotonic clock."""
    names = list(ways)
    taken: dict[str, list[T]] = {name: [] for name in names}
    for turn in range(rounds):
        if turn > 1 and time.monotonic() > until:
            break
        first = turn % len(names)  # another in each round, so that all meet the same noise
        for name in names[first:] + names[:first]:
            taken[name].append(ways[name]())
    return taken


def timed(
    act: Callable[[], object],
    count: int = 1,
    *,
    before: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
) -> float:
    """Seconds of one call, on average over so many."""
    before()
    begin = time.perf_counter()
    for _ in range(count):
        act()
    after()
    return (time.perf_counter() - begin) / count


def compared(
    taken: Mapping[str, Sequence[float]], beside: str, unit: str, what: str = "{}", scale: float = 1
) -> list[Row]:
    """A row for each way, whose name stands in `what`, beside one of them; `scale` makes the unit of what was taken."""
    rows = []
    for name, found in taken.items():
        # those of the same turn: what slows the machine for a while slows both
        ratios = [mine / other for mine, other in zip(found, taken[beside], strict=True)]
        ratio = () if name == beside else (statistics.median(ratios), beside)
        rows.append(Row(what.format(name), scale * statistics.median(found), unit, *ratio))
    return rows


def json_of(rows: Sequence[Row], load: float, **more: Any) -> str:
    return json.dumps({"load": load, **more, "rows": [asdict(row) for row in rows]}, indent=2)


def markdown_of(rows: Sequence[Row]) -> str:
    lines = ["| what | value | unit | compared |", "| --- | ---: | --- | --- |"]
    for row in rows:
        compared = "" if row.ratio is None else f"{row.ratio:.3f} × {row.beside}"
        value = f"{row.value:,.0f}" if row.value >= 1000 else f"{row.value:.4g}"
        lines.append(f"| {row.name} | {value} | {row.unit} | {compared} |")
    return "\n".join(lines)


def print_rows(rows: Sequence[Row], load: float, about: str = "", decimals: int = 2) -> None:
    """Print what was measured, with the load of the machine before; `about` says more of it."""
    print("; ".join(filter(None, [f"load average at the beginning: {load:.2f}", about])))
    width = max(len(row.name) for row in rows)
    for row in rows:
        beside = "" if row.ratio is None else f"{row.ratio:>8.3f} x {row.beside}"
        print(f"{row.name:<{width}} {row.value:>12,.{decimals}f} {row.unit:<10} {beside}".rstrip())
