"""What this package costs on NVIDIA GPUs, one or all that are here: ours, Hugging Face Accelerate's and bare PyTorch in turns."""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.bench import bench_checkpoints, bench_gpt, bench_gpt_shards, bench_operations, bench_step, rank_moments
from tests.bench.rows import Row, json_of, markdown_of, print_rows
from tests.ranks import run_on_ranks

# Below this much memory on a GPU the batches of the GPT are a quarter.
ROOM = 40 << 30
# What torchrun says to a process; one that is alone is told nothing of the kind, or Accelerate takes it for one of several.
PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def main() -> None:
    arguments = read_arguments()
    if not arguments.tiny and not torch.cuda.is_available():
        print("torch sees no NVIDIA GPU here: nothing measured (--tiny tries everything on the CPU, with two ranks)")
        return
    load = os.getloadavg()[0]
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    for name in arguments.only or SECTIONS:
        print(f"== {name}", flush=True)
        try:
            measure, share = SECTIONS[name]
            for row in measure(arguments.tiny, share * arguments.seconds):
                rows.append(row)
        except Exception as error:
            left_out[name] = str(error)
            print(f"{name} is left out: {error}")
        # whatever a later section does, this is there
        write(arguments.json, json_of(rows, load, machine=machine(arguments.tiny), left_out=left_out))
        write(arguments.markdown, markdown_of(rows))
    if rows:
        about = ", ".join(f"{key} {value}" for key, value in machine(arguments.tiny).items())
        print_rows(rows, load, about)
    sys.exit(0 if rows else 1)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long all of it may take, about")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS))
    parser.add_argument("--tiny", action="store_true", help="on the CPU, with two ranks, a tiny model and few rounds")
    parser.add_argument("--json", type=Path, help="the file that gets the numbers for a program")
    parser.add_argument("--markdown", type=Path, help="the file that gets a table for the docs")
    return parser.parse_args()


def write(path: Path | None, text: str) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")


def machine(tiny: bool) -> dict[str, Any]:
    if tiny:
        return {"device": "CPU", "ranks": 2, "torch": torch.__version__}
    name = torch.cuda.get_device_name(0)
    return {"device": name, "ranks": torch.cuda.device_count(), "torch": torch.__version__, "CUDA": torch.version.cuda}


def ranks(tiny: bool) -> int:
    return 2 if tiny else torch.cuda.device_count()


def in_one_process(measure: Callable[..., list[Row]], *arguments: Any, limit: float) -> list[Row]:
    return run_on_ranks(alone, 1, measure, arguments, limit=limit)[0]


def alone(measure: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """What a function returns where nobody says that there are other processes."""
    for name in PLACE:
        os.environ.pop(name, None)
    return measure(*arguments)


def training(tiny: bool, seconds: float) -> list[Row]:
    """Tokens a second of a GPT on one GPU; ours is to be at least 0.99 of the hand-written loop's."""
    return in_one_process(training_in_process, tiny, seconds / 2, limit=seconds)


def training_in_process(tiny: bool, seconds: float) -> list[Row]:
    """The same in this process, which wakes CUDA."""
    if tiny:
        return bench_gpt.measure(bench_gpt.TINY, 2)
    shape = bench_gpt.Shape()
    if torch.cuda.get_device_properties(0).total_memory < ROOM:
        shape = replace(shape, batch=shape.batch // 4)
    return bench_gpt.measure(shape, 8, seconds)


def sharding(tiny: bool, seconds: float) -> Iterator[Row]:
    """A step and the memory of a GPT whose weights are sharded; ours is to take at most 1.03 of the hand-written step."""
    return bench_gpt_shards.rows_of(ranks(tiny), 2 if tiny else 6, seconds, tiny=tiny)


def launching(tiny: bool, seconds: float) -> list[Row]:
    """Warm launches, first while CUDA sleeps in this process, then while it is awake."""
    rounds, until = (2 if tiny else 9), time.monotonic() + seconds / 2
    kind, size = "cpu" if tiny else "cuda", ranks(tiny)
    launch = partial(rank_moments.launched, kind, num_processes=size, cpu=tiny)
    launch()  # warm from here on
    asleep = [launch() for _ in range(rounds)]
    assert not torch.cuda.is_initialized()
    held = torch.ones(1 << 20, device=kind)
    ours, theirs = "accelerate_nb, CUDA awake", "torch.multiprocessing.spawn, CUDA awake"
    found: dict[str, list[tuple[float, float]]] = {"accelerate_nb, CUDA asleep": asleep, ours: [], theirs: []}
    for turn in range(rounds):
        found[ours].append(launch())
        # fresh Pythons: what torch offers to a process whose CUDA is awake, which can't be forked
        if turn < 3 and time.monotonic() < until:
            found[theirs].append(rank_moments.spawned(torch.multiprocessing.spawn, size, kind, nprocs=size))
    assert held.sum().item() == held.numel()
    rows = []
    for number, what in enumerate(("to the first line", "to a number that the device computed")):
        middle = {name: 1e3 * statistics.median(run[number] for run in times) for name, times in found.items() if times}
        for name, value in middle.items():
            ratio = () if name == theirs or theirs not in middle else (value / middle[theirs], theirs)
            rows.append(Row(f"warm launch {what}: {name}", value, "ms", *ratio))
    return rows


def operating(tiny: bool, seconds: float) -> list[Row]:
    size = ranks(tiny)
    if size == 1:
        raise RuntimeError("calls between ranks need two GPUs, and there is one here")
    rounds, limit = 2 if tiny else 20, seconds / 2
    sizes = ("64 B", "16 MB")
    return [row for only in sizes for row in run_on_ranks(bench_operations.measure, size, rounds, only, limit=limit)[0]]


def stepping(tiny: bool, seconds: float) -> list[Row]:
    """What a step of a tiny model takes: on one GPU, and on all of them."""
    rounds = 1 if tiny else 9
    rows = in_one_process(bench_step.measure, rounds, limit=seconds / 2)
    if ranks(tiny) > 1:
        rows += run_on_ranks(bench_step.measure, ranks(tiny), rounds, limit=seconds / 2)[0]
    return rows


def saving(tiny: bool, seconds: float) -> list[Row]:
    """How long a checkpoint of a model of 84 MB with AdamW keeps the training."""
    with tempfile.TemporaryDirectory() as folder:
        return in_one_process(bench_checkpoints.measure, 1 if tiny else 5, folder, limit=seconds)


# With the part of the time that a section may take; one that is not over by then is left out, and said to be.
SECTIONS: dict[str, tuple[Callable[[bool, float], Iterable[Row]], float]] = {
    "gpt": (training, 0.25),
    "shards": (sharding, 0.3),
    "launch": (launching, 0.1),
    "operations": (operating, 0.1),
    "step": (stepping, 0.1),
    "checkpoints": (saving, 0.15),
}


if __name__ == "__main__":
    main()
