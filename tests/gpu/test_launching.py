"""Launches on GPUs that the launching process uses itself, that run full, and that never come to an end."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from accelerate_nb import Accelerator, WorkerError
from accelerate_nb.config.run_config import resolve
from accelerate_nb.events.event_types import DeviceSample
from accelerate_nb.launching.engines import supervisor
from accelerate_nb.launching.run import Run
from accelerate_nb.launching.session import Session
from tests.gpu.devices import compute_for, finish, is_pretended
from tests.waiting import until

MIB = 1 << 20
HELD = 512 * MIB
ADVICE = {"cuda": "What to do: Take a smaller batch", "cpu": "What to do: The machine's memory is full"}


@pytest.fixture(autouse=True)
def _the_device_is_in_use(device: str) -> Iterator[None]:
    """This process uses the device already, as a notebook does in which something was tried."""
    held = torch.ones(1024, device=device)
    yield
    assert held.sum().item() == 1024


def own_device_and_sum() -> tuple[str, float]:
    accelerator = Accelerator()
    return str(accelerator.device), float(accelerator.reduce(torch.ones(1, device=accelerator.device), "sum"))


def test_a_launch_from_a_process_that_uses_the_devices_has_one_rank_on_each(
    launched: Callable[..., list[Any]], device: str, ranks: int
) -> None:
    devices = [f"cuda:{rank}" for rank in range(ranks)] if device == "cuda" else ["cpu"] * ranks
    for _ in range(2):
        assert launched(own_device_and_sum) == [(name, float(ranks)) for name in devices]


def doubled(given: torch.Tensor) -> torch.Tensor:
    return 2 * given.to(Accelerator().device)


def test_tensors_travel_to_the_ranks_and_their_results_back(
    launched: Callable[..., list[Any]], device: str, ranks: int
) -> None:
    found = launched(doubled, torch.arange(3, device=device))
    assert [item.tolist() for item in found] == [[0, 2, 4]] * ranks


def test_a_forked_launch_reports_why_it_cannot_use_the_gpu(launched: Callable[..., list[Any]], device: str) -> None:
    if device == "cpu":
        assert launched(own_device_and_sum, start_method="fork")
        return
    with pytest.raises(WorkerError, match=r"What to do: The notebook has used the GPU already: leave start_method out"):
        launched(own_device_and_sum, start_method="fork")


# -------------------------------------------------------------------------------------------------------------- memory


def too_much() -> None:
    torch.empty(1 << 50, dtype=torch.uint8, device=Accelerator().device)


def test_memory_that_runs_out_is_answered_in_the_error(launched: Callable[..., list[Any]], device: str) -> None:
    with pytest.raises(WorkerError, match=ADVICE[device]) as caught:
        launched(too_much)
    assert isinstance(caught.value, torch.OutOfMemoryError if device == "cuda" else RuntimeError)


FILLS = """
def fill():
    blocks = [torch.ones(64 << 20, dtype=torch.uint8, device=device)]
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(0.05, device)
    while device.type == "cuda":
        blocks.append(torch.ones(64 << 20, dtype=torch.uint8, device=device))
    torch.empty(1 << 50, dtype=torch.uint8, device=device)
fill()
"""


def test_a_session_goes_on_after_a_cell_in_which_memory_ran_out(device: str, ranks: int, tmp_path: Path) -> None:
    settings = {"num_processes": ranks, "cpu": device == "cpu", "folder": str(tmp_path)}
    with closing(Session.start(resolve(settings, {}))) as session:
        session.run("import torch\nbefore = torch.ones(8, device=device)").wait()
        with pytest.raises(WorkerError, match=ADVICE[device]):
            session.run(FILLS).wait()
        session.run("held = 0 if device.type == 'cpu' else torch.cuda.memory_allocated(device)").wait()
        for values in session.pull(["before", "held"], ranks=tuple(range(ranks))).values():
            assert (values["before"].sum().item(), values["before"].device.type) == (8.0, "cpu")
            assert values["held"] < 64 * MIB


def fill_and_compute() -> None:
    device = Accelerator().device
    held = torch.ones(HELD, dtype=torch.uint8, device=device)
    while held[0].item():
        (torch.ones(2048, 2048, device=device) @ torch.ones(2048, 2048, device=device)).sum().item()


def test_a_run_knows_how_busy_each_ranks_device_is(started: Callable[..., Run], device: str, ranks: int) -> None:
    run = started(fill_and_compute, stop_grace_period=0.5)

    def sample(rank: int) -> DeviceSample | None:
        return run.view.rank(rank).devices.get("cpu" if device == "cpu" else f"cuda:{rank}")

    def is_seen(rank: int) -> bool:
        found = sample(rank)
        return found is not None and bool(found.utilisation) and (found.memory_used or 0) >= HELD

    until(lambda: all(map(is_seen, range(ranks))), run)
    found = [sample(rank) for rank in range(ranks)]
    run.stop(0)
    assert run.done
    for item in found:
        assert item is not None
        assert item.memory_total is not None
        assert item.memory_total > HELD


# --------------------------------------------------------------------------------------------------------------- stuck


def stuck() -> None:
    device = Accelerator().device
    held = torch.ones(HELD, dtype=torch.uint8, device=device)
    finish(device)
    print("there", os.getpid(), flush=True)
    compute_for(600, device)
    finish(device)
    del held


def free_memory(device: str, ranks: int) -> list[int]:
    """The bytes that are free on each GPU."""
    return [torch.cuda.mem_get_info(number)[0] for number in range(ranks)] if device == "cuda" else []


def test_ranks_in_a_kernel_that_does_not_end_are_stopped_and_their_memory_is_free_again(
    started: Callable[..., Run],
    launched: Callable[..., list[Any]],
    device: str,
    ranks: int,
    record_property: Callable[[str, object], None],
) -> None:
    before = free_memory(device, ranks)
    run = started(stuck, stop_grace_period=1.0)
    until(lambda: all("there" in run.logs(rank) for rank in range(ranks)), run)
    workers = [int(run.logs(rank).split()[-1]) for rank in range(ranks)]
    assert all(now <= then - HELD for now, then in zip(free_memory(device, ranks), before, strict=True))
    begun = time.monotonic()
    run.stop(1)
    assert run.done
    assert not any(map(psutil.pid_exists, workers))
    # the context of a worker that has gone takes its memory along, and other programs may have taken some meanwhile
    until(
        lambda: all(now > then - HELD // 4 for now, then in zip(free_memory(device, ranks), before, strict=True)),
        timeout=15,
    )
    record_property("seconds_from_the_stop_to_free_memory", time.monotonic() - begun)
    assert len(launched(own_device_and_sum)) == ranks


# ------------------------------------------------------------------------------------------------------- the supervisor

# pyarrow, which some of these import, starts a thread. torchao, which the last one imports where it is installed, asks for GPUs.
IMPORTED = ("pandas", "sklearn.linear_model", "torchao", "transformers.trainer")


def are_loaded(names: list[str]) -> list[bool]:
    return [name in sys.modules for name in names]


@pytest.mark.filterwarnings("ignore:.* wakes a GPU as it is imported")
def test_what_notebooks_import_is_loaded_ahead_and_leaves_the_device_to_ranks(
    launched: Callable[..., list[Any]], device: str, ranks: int
) -> None:
    names = [name for name in IMPORTED if find_spec(name.partition(".")[0])]
    if not names:
        pytest.skip(f"none of {', '.join(IMPORTED)} is installed here")
    supervisor.preload(names)
    # what else one of them does to a GPU, on a machine with more packages, is not known: then each worker imports it
    fit = list if is_pretended() else supervisor._warmth.get().fit
    until(lambda: launched(are_loaded, fit(names), num_processes=1) == [[True] * len(fit(names))])
    assert [total for _, total in launched(own_device_and_sum)] == [float(ranks)] * ranks
