"""What a checkpoint costs: ours and Hugging Face Accelerate's side by side, interleaved in one run."""

import gc
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accelerate_nb.reports.text_format import counted
from accelerate_nb.runtime.world.registry import current_world
from tests.bench.rows import Row, compared, print_rows, read_arguments, timed
from tests.ranks import run_on_ranks

LAYERS, WIDTH = 20, 1024


def main() -> None:
    """Measure with one process and with two, and print what was found."""
    flags = {
        "single": {"action": "store_true", "help": "one process only"},
        "folder": {"default": tempfile.gettempdir(), "help": "where the checkpoints are written"},
    }
    arguments, load = read_arguments(__doc__, rounds=9, **flags), os.getloadavg()[0]
    rows = measure(arguments.rounds, arguments.folder)
    if not arguments.single:
        rows += run_on_ranks(measure, 2, arguments.rounds, arguments.folder, limit=120 + 20 * arguments.rounds)[0]
    size = LAYERS * WIDTH * WIDTH * 4 / 1e6
    about = f"a model of {size:.0f} MB with AdamW; ours is on the disk when it returns, theirs is not"
    print_rows(rows, load, as_json=arguments.json, about=about, decimals=1)


def measure(rounds: int, folder: str) -> list[Row]:
    """The median time of each way; they take turns, so that all meet the same noise."""
    torch.set_num_threads(1)
    world = current_world()
    home = Path(folder, "bench_checkpoints")
    # Accelerate writes into a folder that is there; each save gets a folder of its own, as numbered ones do
    theirs, ours = hugging_face(world.device), this_package()
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
    gc.disable()
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
    gc.enable()
    together()
    if world.is_main:
        shutil.rmtree(home)
    rows = []
    for action in ("save_state", "load_state"):
        of_action = {name: times for name, times in taken.items() if name.startswith(action)}
        rows += compared(of_action, f"{action}, Accelerate", "ms", f"{counted(world.size, 'rank')}: {{}}", 1e3)
    return rows


def together() -> None:
    """All processes come here, and with them what they gave a GPU to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


def this_package() -> Any:
    """A training with this package."""
    from accelerate_nb import Accelerator

    return stepped(Accelerator())


def hugging_face(device: torch.device) -> Any:
    """A training with Hugging Face Accelerate, which wants to be told that it runs on CPUs."""
    from accelerate import Accelerator

    return stepped(Accelerator(cpu=device.type == "cpu"))


def stepped(accelerator: Any) -> Any:
    """The accelerator after one step of a training, so that the optimizer has a state."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.randn(2, WIDTH, device=accelerator.device)).sum())
    optimizer.step()
    optimizer.zero_grad()
    return accelerator


if __name__ == "__main__":
    main()
