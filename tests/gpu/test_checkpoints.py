"""A save in the background copies a GPU's memory to memory that is locked for it, and the training goes on meanwhile."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelerate_nb import Accelerator
from accelerate_nb.runtime.checkpoints.host_copy import HostCopier
from tests.gpu.devices import compute_for, finish, synchronizing_is_an_error


def test_copies_lie_in_locked_memory_and_wait_for_the_device_once(device: str) -> None:
    state = {"weights": torch.arange(1 << 20, device=device), "steps": [torch.ones(3, device=device), 7]}
    copier = HostCopier()
    compute_for(0.5, device)
    with synchronizing_is_an_error(device):
        copied = copier.copy(state)
    copier.finish()
    assert copied["weights"].device.type == "cpu"
    assert copied["weights"].is_pinned() == (device == "cuda")
    state["weights"].zero_()
    finish(device)
    assert torch.equal(copied["weights"], torch.arange(1 << 20))
    assert [copied["steps"][0].tolist(), copied["steps"][1]] == [[1.0] * 3, 7]


def test_the_memory_of_a_copy_serves_the_next_one(device: str) -> None:
    copier, state = HostCopier(), {"weights": torch.ones(1 << 20, device=device)}
    places = set()
    for number in range(3):
        state["weights"].fill_(number)
        copied = copier.copy(state)
        copier.finish()
        assert copied["weights"][:2].tolist() == [number] * 2
        places.add(copied["weights"].data_ptr())
    assert len(places) == 1


def numbers(*objects: Any) -> list[float]:
    """All parameters, and what an optimizer keeps of each."""
    model, optimizer = objects
    kept = [item["exp_avg"] for item in optimizer.state.values()]
    return [item.double().sum().item() for item in (*model.parameters(), *kept)]


def saves_or_loads(device: str, folder: str, saves: bool) -> list[float]:
    """The numbers of a model and its AdamW that are saved in the background after a step, before another one, or loaded."""
    accelerator = Accelerator(cpu=device == "cpu")
    torch.manual_seed(0 if saves else 1)
    model = nn.Linear(16, 16)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    assert next(model.parameters()).device.type == device
    if saves:
        accelerator.backward(model(torch.ones(4, 16, device=accelerator.device)).square().sum())
        optimizer.step()
        accelerator.save_state(folder, blocking=False)
        saved = numbers(model, optimizer)
        optimizer.step()
        assert numbers(model, optimizer) != saved
        return saved
    accelerator.load_state(folder)
    return numbers(model, optimizer)


def test_a_checkpoint_of_a_device_is_loaded_on_the_cpu_and_the_other_way_round(
    launched: Callable[..., Any], device: str, tmp_path: Path
) -> None:
    for first, second in ((device, "cpu"), ("cpu", device)):
        folder = str(tmp_path / first)
        (saved,) = launched(saves_or_loads, first, folder, True, num_processes=1, cpu=first == "cpu")
        (loaded,) = launched(saves_or_loads, second, folder, False, num_processes=1, cpu=second == "cpu")
        assert loaded == saved


def trains(folder: str, dies: bool) -> tuple[bool, list[float]]:
    """Six steps with dropout; the last rank's first process dies after the fifth, where it is asked to."""
    torch.manual_seed(5)
    accelerator = Accelerator()
    model = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.2), nn.Linear(32, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    is_resumed = accelerator.resume()
    for step in range(3 if is_resumed else 0, 6):
        accelerator.backward(model(torch.full((8, 32), step + 1.0, device=accelerator.device)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            accelerator.save_state(f"{folder}/saved_{dies}")
        if step == 4 and dies and not is_resumed and accelerator.is_last_process:
            os.kill(os.getpid(), signal.SIGKILL)
    return is_resumed, [value.item() for parameter in model.parameters() for value in parameter.flatten()]


def test_ranks_that_start_again_go_on_with_the_same_numbers(launched: Callable[..., list[Any]], tmp_path: Path) -> None:
    undisturbed = launched(trains, str(tmp_path), False)
    again = launched(trains, str(tmp_path), True, max_restarts=1)
    assert [is_resumed for is_resumed, _ in (*undisturbed, *again)] == [False] * len(undisturbed) + [True] * len(again)
    assert [numbers for _, numbers in again] == [numbers for _, numbers in undisturbed]
