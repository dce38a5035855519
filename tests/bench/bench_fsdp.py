"""What sharded weights cost: a step and the memory of a process, beside hand-written `fully_shard` and Accelerate, in one run."""

import argparse
import resource
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accelerate_nb.runtime.world.registry import current_world
from tests.bench.bench_gpt import GPT, Shape
from tests.bench.bench_gpt_shards import WAYS
from tests.bench.rows import Row, compared, in_turns, main, timed, without_collector
from tests.ranks import run_on_ranks

FLAGS: dict[str, Any] = {
    "width": {"type": int, "default": 256, "help": "the width of the GPT"},
    "blocks": {"type": int, "default": 6, "help": "how many blocks it has"},
    "megabytes": {"type": int, "default": 256, "help": "how much a process saves"},
}


def measure(arguments: argparse.Namespace) -> list[Row]:
    sizes = (arguments.width, arguments.blocks)
    rows: list[Row] = run_on_ranks(steps, 2, arguments.rounds, *sizes, limit=1800)[0]
    hand = 0.0
    for way in WAYS:
        peak = max(run_on_ranks(memory, 2, way, *sizes, limit=600))
        hand = hand or peak
        rows.append(Row(f"2 ranks, peak memory: {way}", peak / 2**20, "MiB", peak / hand, "hand-written"))
    return rows + run_on_ranks(saves, 2, arguments.megabytes, limit=600)[0]


def steps(rounds: int, width: int, blocks: int) -> list[Row]:
    """The median time of a step of each way, and the median of its ratios to the hand-written one in the same round."""
    torch.set_num_threads(1)
    current_world()
    ways = {name: step_of(name, width, blocks) for name in WAYS}
    for step in ways.values():
        step()
    with without_collector():
        taken = in_turns({name: partial(timed, step, 3, before=dist.barrier) for name, step in ways.items()}, rounds)
    return compared(taken, "hand-written", "ms", "2 ranks, step: {}", 1e3)


def memory(way: str, width: int, blocks: int) -> int:
    """The bytes that a process took at most, above what it had before."""
    torch.set_num_threads(1)
    current_world()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = step_of(way, width, blocks)
    for _ in range(3):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def saves(megabytes: int) -> list[Row]:
    """How long a save in the background holds a training up after the first one: ours, and torch's own `async_save`."""
    from torch.distributed.checkpoint import FileSystemWriter, async_save
    from torch.distributed.checkpoint.state_dict import get_state_dict

    from accelerate_nb import Accelerator
    from accelerate_nb.utils import broadcast_object_list

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    width = 1024
    # a weight, and two numbers of AdamW's for it, on two processes
    layers = [nn.Linear(width, width, bias=False) for _ in range(megabytes * 2**20 * 2 // (12 * width * width))]
    model = nn.Sequential(*layers)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.randn(1, width)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    ours, torchs, writing = [], [], []

    def by_torch(path: str) -> None:
        states, kept = get_state_dict(model, optimizer.optimizer)
        writing.append(async_save({"model": states, "optimizer": kept}, storage_writer=FileSystemWriter(path)))

    with tempfile.TemporaryDirectory() as own:
        folder = broadcast_object_list([own])[0]
        for number in range(5):
            save = partial(accelerator.save_state, f"{folder}/ours/{number}", blocking=False)
            ours.append(timed(save, before=accelerator.wait_for_everyone))
            accelerator.wait_for_checkpoint()
            save = partial(by_torch, f"{folder}/torchs/{number}")
            torchs.append(timed(save, before=accelerator.wait_for_everyone))
            writing[-1].result()
        accelerator.wait_for_everyone()
    bare, held = statistics.median(torchs[1:]), statistics.median(ours[1:])
    name = f"2 ranks, hold-up of a save in the background, {megabytes} MB a rank"
    return [
        Row(f"{name}: torch's async_save", bare * 1e3, "ms", 1.0, "async_save"),
        Row(f"{name}: accelerate_nb", held * 1e3, "ms", held / bare, "async_save"),
    ]


def step_of(way: str, width: int, blocks: int) -> Callable[[], None]:
    """A step of one way, with the same weights and inputs for each."""
    torch.manual_seed(0)
    shape = Shape(layers=blocks, heads=4, width=width, vocabulary=256, context=64, batch=4)
    step = WAYS[way](partial(GPT, shape), bf16=False)
    return partial(step, torch.randint(shape.vocabulary, (shape.batch, shape.context)))


if __name__ == "__main__":
    main(measure, __doc__, 15, **FLAGS)
