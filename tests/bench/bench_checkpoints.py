"""What a checkpoint costs: ours and Hugging Face Accelerate's side by side, interleaved in one run."""

import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelerate_nb.reports.text_format import counted
from accelerate_nb.runtime.world.registry import current_world
from tests.bench.rows import SINGLE, Row, compared, main, on_one_and_two, timed, together, without_collector

LAYERS, WIDTH = 20, 1024
SIZE = LAYERS * WIDTH * WIDTH * 4 / 1e6
NOTE = f"a model of {SIZE:.0f} MB with AdamW; ours is on the disk when it returns, theirs is not"
FOLDER: dict[str, Any] = {"default": tempfile.gettempdir(), "help": "where the checkpoints are written"}


def measure(rounds: int, folder: str) -> list[Row]:
    torch.set_num_threads(1)
    world = current_world()
    home = Path(folder, "bench_checkpoints")
    # Accelerate writes into a folder that is there; each save gets a folder of its own, as numbered ones do
    theirs, ours = (stepped(package, world.device) for package in ("accelerate", "accelerate_nb"))
    ways: dict[str, Callable[[Path], Any]] = {
        "save_state, Accelerate": theirs.save_state,
        "save_state, accelerate_nb": ours.save_state,
        "save_state(blocking=False)": lambda to: ours.save_state(to, blocking=False),
        "load_state, Accelerate": theirs.load_state,
        "load_state, accelerate_nb": ours.load_state,
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    fixed = {"load_state, Accelerate": home / "theirs", "load_state, accelerate_nb": home / "ours"}
    theirs.save_state(fixed["load_state, Accelerate"])
    ours.save_state(fixed["load_state, accelerate_nb"])
    with without_collector():
        for turn in range(rounds + 1):
            for number, (name, way) in enumerate(ways.items()):
                path = fixed.get(name, home / f"{turn}-{number}")
                # what one process waits for is waited for by all
                took = timed(partial(way, path), before=together, after=together)
                if turn > 0:  # the first turn allocates
                    taken[name].append(took)
                ours.wait_for_checkpoint()
                together()
                if path not in fixed.values() and world.is_main:
                    shutil.rmtree(path)
    together()
    if world.is_main:
        shutil.rmtree(home)
    rows = []
    for action in ("save_state", "load_state"):
        of_action = {name: times for name, times in taken.items() if name.startswith(action)}
        rows += compared(of_action, f"{action}, Accelerate", "ms", f"{counted(world.size, 'rank')}: {{}}", 1e3)
    return rows


def stepped(package: str, device: torch.device) -> Any:
    """The package's accelerator after one step of a training, so that the optimizer has a state."""
    accelerator = import_module(package).Accelerator(cpu=device.type == "cpu")
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.randn(2, WIDTH, device=accelerator.device)).sum())
    optimizer.step()
    optimizer.zero_grad()
    return accelerator


if __name__ == "__main__":
    main(
        lambda given: on_one_and_two(measure, given, given.folder),
        *(__doc__, 9),
        decimals=1,
        note=NOTE,
        single=SINGLE,
        folder=FOLDER,
    )
