"""What one step costs: ours, Hugging Face Accelerate's and hand-written PyTorch side by side, interleaved in one run."""

import socket
import statistics
import threading
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from accelerate_nb import Accelerator
from accelerate_nb.events.event_codec import EventSender
from accelerate_nb.rank.event_sink import connect
from accelerate_nb.reports.text_format import counted
from accelerate_nb.runtime.world.registry import current_world
from tests.bench.rows import (
    SINGLE,
    Row,
    compared,
    finish,
    in_turns,
    main,
    on_one_and_two,
    timed,
    together,
    without_collector,
)

STEPS = 200
Epoch = Callable[[], None]


def measure(rounds: int) -> list[Row]:
    torch.set_num_threads(1)
    # connects the processes, which all three loops then find connected
    world = current_world()
    loops: dict[str, Epoch] = {
        "hand-written": hand_written(world.device),
        "accelerate_nb": prepared(Accelerator()),
        "with autolog": watched(),
        # it wants to be told that it runs on CPUs
        "Accelerate": prepared(import_module("accelerate").Accelerator(cpu=world.device.type == "cpu")),
    }
    for epoch in loops.values():
        epoch()

    ways = {name: partial(timed, epoch, before=together, after=finish) for name, epoch in loops.items()}
    with without_collector():
        taken = in_turns(ways, rounds)
    ranks = counted(world.size, "rank")
    rows = compared(taken, "hand-written", "µs", f"a step of a tiny model on {ranks}: {{}}", 1e6 / STEPS)
    hand = taken["hand-written"]
    for name, times in taken.items():
        added = statistics.median(mine - other for mine, other in zip(times, hand, strict=True))
        rows += [Row(f"  added: {name}", added * 1e6 / STEPS, "µs")] if times is not hand else []
    return rows


def parts(size: int) -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    """A tiny model, so that what is measured is everything else."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    data = TensorDataset(torch.randn(STEPS * 4 * size, 8), torch.randn(STEPS * 4 * size, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.01), data


def hand_written(device: torch.device) -> Epoch:
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


def watched() -> Epoch:
    """The loop with this package as in a worker, whose metrics of each step are sent to a thread that reads them."""
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
    while sock.recv(65536):
        pass


def prepared(accelerator: Any) -> Epoch:
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
    main(partial(on_one_and_two, measure), __doc__, 15, single=SINGLE)
