"""What a step with DeepSpeed costs here, beside a loop that is written for DeepSpeed by hand, alternating in one run."""

import argparse
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_nb import Accelerator
from accelerate_nb.utils import DeepSpeedPlugin
from tests.bench.rows import Row, compared, in_turns, main, timed
from tests.ranks import run_on_ranks

BATCH = 8
Step = Callable[[], None]


def measure(arguments: argparse.Namespace) -> list[Row]:
    if find_spec("deepspeed") is None:
        print("DeepSpeed is not installed here: `make test-scale` makes an environment that has it")
        return []
    sizes = (arguments.rounds, arguments.width)
    return [row for stage in (1, 2, 3) for row in run_on_ranks(steps, 2, stage, *sizes, limit=1800)[0]]


def steps(stage: int, rounds: int, width: int) -> list[Row]:
    """The median time of a step of each way, and the median of the ratios in the same round."""
    torch.set_num_threads(1)
    ways = {"ours": ours(stage, width), "hand-written": by_hand(stage, width)}
    for step in ways.values():
        step()
    taken = in_turns({name: partial(timed, step, 5) for name, step in ways.items()}, rounds)
    return compared(taken, "hand-written", "ms", f"2 ranks, ZeRO {stage}, a step: {{}}", 1e3)


def net(width: int) -> nn.Module:
    torch.manual_seed(0)
    blocks = [layer for _ in range(6) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*blocks, nn.Linear(width, 1))


def ours(stage: int, width: int) -> Step:
    plugin = DeepSpeedPlugin(zero_stage=stage, gradient_clipping=1.0, zero3_init_flag=False)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    model = net(width)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(BATCH, width)
    loader = DataLoader(TensorDataset(batch), batch_size=BATCH)
    model, optimizer, _ = accelerator.prepare(model, optimizer, loader)

    def step() -> None:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_hand(stage: int, width: int) -> Step:
    import deepspeed

    model = net(width)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "steps_per_print": float("inf"),
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    batch = torch.randn(BATCH, width)

    def step() -> None:
        loss = engine(batch).square().mean()
        engine.backward(loss)
        engine.step()

    return step


if __name__ == "__main__":
    main(measure, __doc__, 15, width={"type": int, "default": 512, "help": "the width of the network"})
