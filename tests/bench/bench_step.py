"""What one step costs: ours, Hugging Face Accelerate's and hand-written PyTorch side by side, interleaved in one run."""

from __future__ import annotations

import argparse
import gc
import json
import socket
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from accelerate_nb.events.event_codec import EventSender
from accelerate_nb.rank.event_sink import connect
from accelerate_nb.runtime.world.registry import current_world
from tests.ranks import run_on_ranks

STEPS = 200
Epoch = Callable[[], None]


@dataclass(frozen=True)
class Row:
    """One way to write the loop: microseconds a step (median of the rounds), and what it adds to the hand-written one."""

    name: str
    processes: int
    microseconds: float
    added: float
    ratio: float


def main() -> None:
    """Measure with one process and with two, and print what was found."""
    arguments = read_arguments()
    rows = measure(arguments.rounds)
    if not arguments.single:
        rows += run_on_ranks(measure, 2, arguments.rounds, limit=60 + 4 * arguments.rounds)[0]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    print(f"{'processes':>9}  {'loop':<14} {'µs a step':>10} {'added µs':>9} {'ratio':>6}")
    for row in rows:
        print(f"{row.processes:>9}  {row.name:<14} {row.microseconds:>10.1f} {row.added:>9.1f} {row.ratio:>6.3f}")


def read_arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="how often each loop runs; the loops take turns")
    parser.add_argument("--single", action="store_true", help="one process only")
    parser.add_argument("--json", action="store_true", help="print numbers for a program")
    return parser.parse_args()


def measure(rounds: int) -> list[Row]:
    """The median time of a step of each loop; the loops take turns, so that all meet the same noise."""
    torch.set_num_threads(1)
    # connects the processes, which all three loops then find connected
    device = current_world().device
    loops: dict[str, Epoch] = {
        "hand-written": hand_written(device),
        "accelerate_nb": ours(),
        "with autolog": watched(),
        "Accelerate": hugging_face(device),
    }
    names = list(loops)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        loops[name]()
    gc.collect()
    gc.disable()
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            if dist.is_initialized():
                dist.barrier()
            finish(device)
            begin = time.perf_counter()
            loops[name]()
            finish(device)
            taken[name].append((time.perf_counter() - begin) / STEPS * 1e6)
    gc.enable()
    size = dist.get_world_size() if dist.is_initialized() else 1
    # A loop is compared with the hand-written one of the same turn: what slows the machine for a while slows both.
    added = {
        name: statistics.median(mine - hand for mine, hand in zip(taken[name], taken[names[0]], strict=True))
        for name in names
    }
    ratio = {
        name: statistics.median(mine / hand for mine, hand in zip(taken[name], taken[names[0]], strict=True))
        for name in names
    }
    return [Row(name, size, statistics.median(taken[name]), added[name], ratio[name]) for name in names]


def finish(device: torch.device) -> None:
    """Wait until a GPU has computed everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def parts(size: int) -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    """A tiny model, so that what is measured is everything else."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    data = TensorDataset(torch.randn(STEPS * 4 * size, 8), torch.randn(STEPS * 4 * size, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.01), data


def hand_written(device: torch.device) -> Epoch:
    """The loop as one writes it with nothing but PyTorch."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    model, optimizer, data = parts(size)
    model.to(device)
    sampler = DistributedSampler(data, shuffle=False) if size > 1 else None
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    if size > 1:
        model = DistributedDataParallel(model)

    def epoch() -> None:
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return epoch


def ours() -> Epoch:
    """The loop with this package."""
    from accelerate_nb import Accelerator

    return prepared(Accelerator())


def watched() -> Epoch:
    """The loop with this package as in a worker, whose metrics of each step are sent to a thread that reads them."""
    from accelerate_nb import Accelerator

    theirs, mine = socket.socketpair()
    threading.Thread(target=read_all, args=(theirs,), daemon=True).start()
    sender = EventSender(mine, current_world().rank)
    connect(sender)
    accelerator = Accelerator()
    connect(None)
    epoch = prepared(accelerator)

    def connected_epoch() -> None:
        connect(sender)
        epoch()
        connect(None)

    return connected_epoch


def read_all(sock: socket.socket) -> None:
    """Read until the other end is closed."""
    while sock.recv(65536):
        pass


def hugging_face(device: torch.device) -> Epoch:
    """The loop with Hugging Face Accelerate, which wants to be told that it runs on CPUs."""
    from accelerate import Accelerator

    return prepared(Accelerator(cpu=device.type == "cpu"))


def prepared(accelerator: Any) -> Epoch:
    """The loop that both know."""
    model, optimizer, data = parts(accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))

    def epoch() -> None:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    return epoch


if __name__ == "__main__":
    main()
