"""The functions that tests run on several nodes."""

import time
from typing import Any

import psutil

from accelerate_nb import Accelerator

# A launch of two ranks, which shows nothing, and of two nodes.
TWO_RANKS: dict[str, Any] = {"num_processes": 2, "cpu": True, "panel": "off"}
TWO_NODES: dict[str, Any] = {**TWO_RANKS, "num_nodes": 2}


# Launches `waits` detached with the settings of its first word, and waits, a kernel's place.
LAUNCHES_DETACHED = """
import json, sys
from accelerate_nb import launch
from tests.nodes.trainings import waits
print(launch(waits, **json.loads(sys.argv[1]), detach=True).folder, flush=True)
sys.stdin.read()
"""


def agent_of(worker: psutil.Process) -> psutil.Process:
    """The agent of the node on which a worker runs."""
    return next(parent for parent in worker.parents() if any("agent_process" in word for word in parent.cmdline()))


def waits() -> None:
    print("waits", flush=True)
    time.sleep(600)


def trains(steps: int) -> list[float]:
    import torch

    torch.manual_seed(3)
    accelerator = Accelerator()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(steps * 12, 4), torch.randn(steps * 12, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=12 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
    return [float(value) for parameter in model.parameters() for value in parameter.flatten()]
