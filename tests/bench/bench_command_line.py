"""What a command line costs: `accelerate-nb launch`, torchrun and `accelerate launch` side by side, interleaved in one run."""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.bench.rows import Row, compared, in_turns, main

RANKS = 2
# It imports what every training script does, connects the ranks, and says so.
SCRIPT = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("first line", int(total), flush=True)
dist.destroy_process_group()
"""
# Accelerate's own launch connects no ranks on the CPU without mpirun: it starts one process.
ALONE = 'import torch\nprint("first line 1", flush=True)\n'

OURS = [sys.executable, "-m", "accelerate_nb", "launch", "--cpu", "--config_file", ""]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
THEIRS = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "--num_processes", "1"]


@dataclass(frozen=True)
class Cost:
    """One run of a command: seconds until every rank had written, and until its end, and seconds of CPU of all its processes."""

    first: float
    whole: float
    cpu: float


def measure(arguments: argparse.Namespace) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ACCELERATE_NB_FOLDER"] = str(Path(folder, "runs"))
        os.environ["HF_HOME"] = folder
        return [*launches(arguments.rounds, Path(folder)), *helps(arguments.rounds)]


def launches(rounds: int, folder: Path) -> list[Row]:
    """A script of two ranks, and one of a single process: to the last rank's first line, to the end, and in CPU time."""
    connected, alone = folder / "connected.py", folder / "alone.py"
    connected.write_text(SCRIPT)
    alone.write_text(ALONE)
    commands = {
        "accelerate-nb launch, 2 ranks": ([*OURS, "-n", "2", str(connected)], RANKS),
        "torchrun, 2 ranks": ([*TORCHRUN, "--nproc-per-node", "2", str(connected)], RANKS),
        "accelerate-nb launch, 1 process": ([*OURS, "-n", "1", str(alone)], 1),
        "accelerate launch, 1 process": ([*THEIRS, str(alone)], 1),
    }
    ways = {name: partial(launched, words, ranks) for name, (words, ranks) in commands.items()}
    in_turns(ways, 1)  # fills the disk's cache
    costs = in_turns(ways, rounds)
    pairs = [("2 ranks", "torchrun, 2 ranks"), ("1 process", "accelerate launch, 1 process")]
    return [row for what, other in pairs for row in beside(f"accelerate-nb launch, {what}", other, costs)]


def beside(ours: str, other: str, costs: dict[str, list[Cost]]) -> list[Row]:
    rows = []
    for field, label in (
        ("first", "to every rank's first line"),
        ("whole", "to the end"),
        ("cpu", "CPU of all processes"),
    ):
        mine, peer = (statistics.median(getattr(cost, field) for cost in costs[name]) for name in (ours, other))
        rows += [Row(f"{other}: {label}", peer, "s"), Row(f"{ours}: {label}", mine, "s", mine / peer, other)]
    return rows


def launched(words: Sequence[str], ranks: int) -> Cost:
    begin = time.perf_counter()
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    seen, first = 0, 0.0
    for line in process.stdout:
        seen += line.count("first line")  # ranks that share a stream may write into one line
        if seen == ranks and not first:
            first = time.perf_counter() - begin
    cpu = cpu_of(process)
    assert (process.returncode, seen) == (0, ranks), (words, process.returncode, seen)
    return Cost(first, time.perf_counter() - begin, cpu)


def helps(rounds: int) -> list[Row]:
    commands = {"accelerate launch": THEIRS[:4], "accelerate-nb launch": OURS[:4]}

    def help_of(words: Sequence[str]) -> float:
        nothing = subprocess.DEVNULL
        return cpu_of(subprocess.Popen([*words, "--help"], stdout=nothing, stderr=nothing))

    taken = in_turns({name: partial(help_of, words) for name, words in commands.items()}, rounds)
    return compared(taken, "accelerate launch", "s", "{} --help: CPU")


def cpu_of(process: subprocess.Popen[Any]) -> float:
    """The seconds of the processor that a process, which ends by itself, and its children took."""
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main(measure, __doc__, 7)
