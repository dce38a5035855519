"""What a failure costs: the seconds from a rank's SIGKILL to the next optimizer step of all, after a restart from a checkpoint."""

import argparse
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from accelerate_nb import Accelerator, launch
from accelerate_nb.config.launch import LaunchingConfig
from tests.bench.rows import Row, main

# What torchft publishes for a replica that is killed and joins again, in seconds.
TORCHFT = 1.05


def measure(arguments: argparse.Namespace) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        for name in ("first", "second"):
            restart(Path(folder, name))  # what workers need is loaded when the first run has ended
        found = [restart(Path(folder, str(number))) for number in range(arguments.rounds)]
    delay = LaunchingConfig().restart_delay
    middle = statistics.median(found)
    return [
        Row("SIGKILL to next step, 2 ranks on the CPU", middle, "s", middle / TORCHFT, "torchft's figure"),
        Row("the slowest of them", max(found), "s", max(found) / TORCHFT, "torchft's figure"),
        Row("of which restart_delay", delay, "s"),
    ]


def restart(folder: Path) -> float:
    folder.mkdir()
    settings = {"num_processes": 2, "cpu": True, "config_file": "", "panel": "off", "folder": str(folder / "runs")}
    run = launch(train, (str(folder),), max_restarts=1, results="all", **settings)
    stepped: list[float] = run.wait(120)
    return max(stepped) - float((folder / "killed").read_text())


def train(folder: str) -> float:
    """Save after two steps, die after four; when the first step after that was made."""
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    is_resumed = accelerator.resume()
    for step in range(5):
        accelerator.backward(model(torch.ones(8, 64)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if is_resumed:
            break
        if step == 1:
            accelerator.save_state(f"{folder}/saved")
        if step == 3 and accelerator.process_index == 1:
            Path(folder, "killed").write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
    return time.time()


if __name__ == "__main__":
    main(measure, __doc__, 15, decimals=3)
