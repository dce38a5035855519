"""What a launch costs: ours, a bare forkserver's and Hugging Face Accelerate's side by side, interleaved in one run."""

import argparse
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.bench.rank_moments import note, noted, reduced
from tests.bench.rows import Row, in_turns, main

CAPTURED = 512 << 20  # bytes
LINES = 25_000  # of each rank
WRITERS = 4
MANY = 128  # ranks


def measure(arguments: argparse.Namespace) -> list[Row]:
    torch.set_num_threads(1)
    return [row for name in arguments.only or SECTIONS for row in SECTIONS[name](arguments.rounds)]


def importing(rounds: int) -> list[Row]:
    """CPU milliseconds of `import accelerate_nb` in a fresh Python, beside those of `import accelerate`."""
    taken: dict[str, list[float]] = {"accelerate_nb": [], "accelerate": []}
    for turn in range(min(rounds, 7)):
        for name, found in taken.items():
            if name == "accelerate" and turn >= 3:
                continue  # it imports torch, and takes seconds
            program = f"import time; b = time.process_time(); import {name}; print(time.process_time() - b)"
            found.append(1e3 * float(answer_of(program)))
    brought = answer_of("import sys, accelerate_nb; print('torch' in sys.modules)")
    assert brought == "False", "import accelerate_nb imports torch"
    ours, theirs = (statistics.median(found) for found in taken.values())
    return [
        Row("import accelerate_nb (no torch)", ours, "CPU ms", ours / theirs, "Accelerate's"),
        Row("import accelerate", theirs, "CPU ms"),
    ]


def answer_of(program: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def first_reduce(package: str) -> float:
    import_module(package).Accelerator(cpu=True).reduce(torch.ones(1), "sum")
    return time.time()


def launching(rounds: int) -> list[Row]:
    """Milliseconds from a warm launch's call to an all-reduce that is done on every rank."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    ways: dict[str, Callable[[], float]] = {
        "ours, 2 ranks": lambda: ours(2),
        "ours, 2 ranks, forked from here": lambda: ours(2, start_method="fork"),
        "bare forkserver, 2 ranks": lambda: forkserver(2),
        "Accelerate's notebook_launcher, 2 ranks": lambda: accelerate_s(2),
        "ours, 2 ranks, by its Accelerator": lambda: ours(2, first_reduce, ("accelerate_nb",)),
        "Accelerate's notebook_launcher, 2 ranks, by its Accelerator": lambda: accelerate_s(
            2, first_reduce, "accelerate"
        ),
        "ours, 8 ranks": lambda: ours(8),
        "bare forkserver, 8 ranks": lambda: forkserver(8),
    }

    def attempt(way: Callable[[], float]) -> tuple[float, float] | None:
        begin = time.time()
        try:
            return 1e3 * way(), 1e3 * (time.time() - begin)
        except (ChildFailedError, RuntimeError, FileNotFoundError):
            return None

    for way in ways.values():
        way()
    attempts = in_turns({name: partial(attempt, way) for name, way in ways.items()}, rounds)
    taken = {name: [found[0] for found in several if found] for name, several in attempts.items()}
    returned = {name: [found[1] for found in several if found] for name, several in attempts.items()}
    middle = {name: statistics.median(found) for name, found in taken.items() if found}
    rows = []
    for name, value in middle.items():
        beside = f"bare forkserver, {'8' if '8 ranks' in name else '2'} ranks"
        failed = attempts[name].count(None)
        label = f"warm launch: {name}" + (f" ({failed} failed)" if failed else "")
        ratio = None if name == beside else value / middle[beside]
        rows.append(Row(label, value, "ms", ratio, beside if ratio else ""))
    for name in ("ours, 2 ranks", "ours, 2 ranks, by its Accelerator"):
        theirs = name.replace("ours", "Accelerate's notebook_launcher")
        for when, times in (("until the all-reduce", taken), ("until it has returned", returned)):
            mine, other = (statistics.median(times[way]) for way in (name, theirs))
            rows.append(Row(f"  {when}: {name}", mine, "ms", mine / other, "Accelerate's"))
    rows.append(Row("  slowest: ours, 2 ranks", max(taken["ours, 2 ranks"]), "ms"))
    return rows


def launching_many(rounds: int) -> list[Row]:
    """Seconds from a launch of many ranks to their first all-reduce, beside those from the moment at which gloo began on the first of them."""
    taken: dict[str, list[float]] = {"ours": [], "gloo": [], "forkserver": []}
    for _ in range(min(rounds, 3)):
        begin = time.time()
        ranks = launched(rendezvous_from, MANY)
        last = max(done for _, done in ranks)
        taken["ours"].append(last - begin)
        taken["gloo"].append(last - min(began for began, _ in ranks))
        taken["forkserver"].append(forkserver(MANY))
    ours_, gloo, bare = (statistics.median(found) for found in taken.values())
    return [
        Row(f"warm launch: ours, {MANY} ranks", ours_, "s", ours_ / gloo, "gloo's own time"),
        Row(f"  gloo's own time, {MANY} ranks", gloo, "s"),
        Row(f"  bare forkserver, {MANY} ranks", bare, "s", bare / gloo, "gloo's own time"),
    ]


def rendezvous_from() -> tuple[float, float]:
    return time.time(), reduced()


def ours(size: int, function: Callable[..., float] = reduced, args: tuple[Any, ...] = (), **settings: Any) -> float:
    begin = time.time()
    return max(launched(function, size, args, **settings)) - begin


def launched(function: Callable[..., Any], size: int, args: tuple[Any, ...] = (), **settings: Any) -> list[Any]:
    from accelerate_nb import notebook_launcher

    with tempfile.TemporaryDirectory() as folder:
        return notebook_launcher(
            function, args, num_processes=size, cpu=True, results="all", folder=folder, config_file="", **settings
        )


def forkserver(size: int) -> float:
    """Seconds of the least that one could write by hand: a forkserver with torch loaded, a store on loopback, gloo."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "numpy", __name__])
    begin = time.time()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        store = dist.TCPStore(
            "127.0.0.1",
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=os.dup(listener.fileno()),
        )
    receiver, sender = context.Pipe(duplex=False)
    workers = [context.Process(target=_rendezvous_at, args=(rank, size, store.port, sender)) for rank in range(size)]
    for worker in workers:
        worker.start()
    done = [receiver.recv() for _ in workers]
    for worker in workers:
        worker.join(10)
        worker.kill()
    receiver.close()
    sender.close()
    return max(done) - begin


def _rendezvous_at(rank: int, size: int, port: int, answers: Any) -> None:
    variables = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    answers.send(reduced())
    sys.stdout.flush()
    os._exit(0)


def accelerate_s(size: int, function: Callable[..., float] = reduced, *args: Any) -> float:
    """Seconds of one launch with Hugging Face Accelerate, which forks this process by way of torch's elastic agent."""
    from accelerate import notebook_launcher

    os.environ["ACCELERATE_USE_CPU"] = "1"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nothing:
        try:
            with redirect_stdout(nothing), redirect_stderr(nothing):
                begin = time.time()
                notebook_launcher(note, (folder, function, *args), num_processes=size, use_port=port)
            return float(max(noted(folder, size))) - begin
        finally:
            del os.environ["ACCELERATE_USE_CPU"]


def sums(tensors: Sequence[torch.Tensor]) -> tuple[float, int]:
    """Read every captured byte; when that was done, and this process's share of its memory."""
    total = sum(float(tensor.sum()) for tensor in tensors)
    assert total >= 0
    dist.init_process_group("gloo")
    dist.barrier()
    share = share_of_memory()
    dist.barrier()
    return time.time(), share


def share_of_memory() -> int:
    """Bytes: what is shared by several processes counts in equal parts (PSS of proc(5))."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("Linux tells no PSS here")


def capturing(rounds: int) -> list[Row]:
    """What 512 MB of captured tensors add to a launch on four workers: seconds, and memory of all workers together."""
    tensors = [torch.ones(CAPTURED // 8 // 4) for _ in range(8)]
    taken: dict[str, list[float]] = {"none": [], "captured": []}
    memory: dict[str, list[int]] = {"none": [], "captured": []}
    for turn in range(min(rounds, 5) + 1):
        for name, held in (("none", []), ("captured", tensors)):
            begin = time.time()
            found = launched(sums, 4, (held,))
            if turn:
                taken[name].append(max(done for done, _ in found) - begin)
                memory[name].append(sum(share for _, share in found))
    extra = statistics.median(b - a for a, b in zip(taken["none"], taken["captured"], strict=True))
    more = statistics.median(b - a for a, b in zip(memory["none"], memory["captured"], strict=True))
    return [
        Row("512 MB captured, 4 workers that read all of it: extra time", extra, "s"),
        Row("512 MB captured, 4 workers: extra memory", more / 2**20, "MiB (PSS)", more / CAPTURED, "one copy"),
    ]


def writes(lines: int) -> None:
    for number in range(lines):
        print(f"step {number} loss {number / 7:.4f} and a few words more")


def writing(rounds: int) -> list[Row]:
    """Lines a second from four ranks into the run's state; the first time warms up."""
    rates = [lines_a_second() for _ in range(min(rounds, 5) + 1)]
    return [Row("lines from 4 ranks into the run's state", statistics.median(rates[1:]), "lines/s")]


def lines_a_second() -> float:
    from accelerate_nb import launch

    with tempfile.TemporaryDirectory() as folder:
        run = launch(writes, (LINES,), num_processes=WRITERS, cpu=True, folder=folder, config_file="")
        waiting = threading.Event()
        while run.view.line_count == 0 and not run.done:
            waiting.wait(0.001)
        begin, had = time.perf_counter(), run.view.line_count
        while not run.done:
            waiting.wait(0.001)
        seconds = time.perf_counter() - begin
        assert run.view.line_count == LINES * WRITERS
        return (run.view.line_count - had) / seconds


SECTIONS: dict[str, Callable[[int], list[Row]]] = {
    "import": importing,
    "launch": launching,
    "many": launching_many,
    "captured": capturing,
    "lines": writing,
}


if __name__ == "__main__":
    main(*(measure, __doc__, 15), decimals=1, only={"nargs": "+", "choices": list(SECTIONS)})
