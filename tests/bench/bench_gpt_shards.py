"""A step and the peak memory of a GPT with sharded weights in bf16: hand-written `fully_shard`, ours and Accelerate, one rank a GPU."""

import argparse
import gc
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from accelerate_nb.runtime.world.registry import current_world
from accelerate_nb.utils import release_memory
from tests.bench.bench_gpt import GPT, TINY, Shape
from tests.bench.rows import Row, compared, finish, main, on_gpus_or_tiny, timed
from tests.peers import Peer, say_that_ranks_have_devices
from tests.ranks import run_on_ranks

Step = Callable[[Tensor], None]
Make = Callable[[], nn.Module]  # of a model with `blocks` of class `Block`, whose output is a loss

# GPT-2's smallest with 124 M parameters, and one with 1.3 B, of GPT-3's shape.
SHAPES = {"124 M": Shape(batch=8), "1.3 B": Shape(layers=24, heads=16, width=2048, batch=2)}


def rows_of(count: int, rounds: int, seconds: float, *, tiny: bool) -> Iterator[Row]:
    """The figures on so many ranks: of each model a step of each way in turns, and the memory of each way by itself."""
    shapes = {"tiny": TINY} if tiny else SHAPES
    for size, shape in shapes.items():
        limit = seconds / len(shapes)
        yield from run_on_ranks(measured, count, size, shape, rounds, limit / 2, limit=limit)[0]


def measured(size: str, shape: Shape, rounds: int, seconds: float) -> list[Row]:
    device = current_world().device
    until = time.monotonic() + seconds
    taken: dict[str, list[float]] = {name: [] for name in WAYS}
    peaks: dict[str, float] = {}
    # one way has the memory at a time; each has its turn in every round
    for turn in range(rounds):
        if turn > 1 and _all_agree(time.monotonic() > until):
            break
        names = list(WAYS)[turn % len(WAYS) :] + list(WAYS)[: turn % len(WAYS)]
        for name in names:
            milliseconds, peak = _turn(name, shape, device)
            taken[name].append(milliseconds)
            peaks[name] = peak
    name_of = f"a sharded GPT of {size} in bf16"
    rows = compared(taken, "hand-written", "ms", f"{name_of}, step: {{}}")
    if device.type == "cuda":
        hand = peaks["hand-written"]
        rows += [
            Row(f"{name_of}, peak memory: {name}", peak / 2**30, "GiB", peak / hand, "hand-written")
            for name, peak in peaks.items()
        ]
    return rows


def _turn(name: str, shape: Shape, device: torch.device) -> tuple[float, float]:
    """The milliseconds of a step, and the bytes that it took at most on this rank's GPU."""
    torch.manual_seed(0)
    tokens = torch.randint(shape.vocabulary, (shape.batch, shape.context), device=device)
    step = WAYS[name](partial(GPT, shape), bf16=True)
    for _ in range(2):
        step(tokens)
    finish()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    count = 3 if shape is TINY else 5
    passed = timed(partial(step, tokens), count, before=dist.barrier, after=finish)
    peak = float(torch.cuda.max_memory_allocated()) if device.type == "cuda" else math.nan
    # what a way has made is gone before the next one begins
    del step
    release_memory()
    gc.collect()
    return passed * 1e3, peak


def _all_agree(value: bool) -> bool:
    found = [False] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return any(found)


def hand_written(make: Make, *, bf16: bool) -> Step:
    device = current_world().device
    number = torch.bfloat16 if bf16 else None
    policy = MixedPrecisionPolicy(param_dtype=number, reduce_dtype=number)
    with device:
        model = make()
    for block in model.blocks:  # type: ignore[union-attr]  # a list of modules
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")

    def step(inputs: Tensor) -> None:
        model(inputs).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert isinstance(norm, DTensor)
        norm.full_tensor()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(make: Make, *, bf16: bool) -> Step:
    from accelerate_nb import Accelerator

    is_cpu = current_world().device.type == "cpu"
    return _with(Accelerator(cpu=is_cpu, strategy="fsdp", mixed_precision="bf16" if bf16 else "no"), make)


def accelerates(make: Make, *, bf16: bool) -> Step:
    """The step with Accelerate; on a CPU it is made to take that for a device that it shards over."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState

    is_cpu = current_world().device.type == "cpu"
    AcceleratorState._reset_state(reset_partial_state=True)
    if is_cpu:
        say_that_ranks_have_devices(Peer("accelerate"))
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    return _with(Accelerator(cpu=is_cpu, fsdp_plugin=plugin, mixed_precision="bf16" if bf16 else "no"), make)


def _with(accelerator: Any, make: Make) -> Step:
    # a billion random numbers are soon made by the device, and not by one thread of the host
    with current_world().device:
        model = make()
    fused = current_world().device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    prepared, optimizer = accelerator.prepare(model, optimizer)

    def step(inputs: Tensor) -> None:
        accelerator.backward(prepared(inputs))
        accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


WAYS: dict[str, Callable[..., Step]] = {"hand-written": hand_written, "accelerate_nb": ours, "Accelerate": accelerates}


def on_all(arguments: argparse.Namespace) -> list[Row]:
    count = 2 if arguments.tiny else torch.cuda.device_count()
    return list(rows_of(count, arguments.rounds, 1200, tiny=arguments.tiny))


if __name__ == "__main__":
    tiny = {"action": "store_true", "help": "a tiny model on two ranks of the CPU"}
    main(partial(on_gpus_or_tiny, on_all), __doc__, 6, tiny=tiny)
