"""A rank that computes through torch_xla knows its place, however its process came to be, and shares its state with no other rank."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accelerate_nb import Accelerator, PartialState
from accelerate_nb.runtime.world.registry import forget
from accelerate_nb.sources.cells import CellSources
from accelerate_nb.transport.outcome import failure_of

pytestmark = pytest.mark.slow

# As torchrun starts one process of one (`torch/distributed/elastic/agent/server/local_elastic_agent.py`).
OF_TORCHRUN = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "TORCHELASTIC_RUN_ID": "none",
}
PLACE = "from tests.xla import test_world; print(test_world.rank_facts())"


def rank_facts() -> tuple[Any, ...]:
    state = PartialState()
    numbers = state.process_index, state.num_processes, state.local_process_index, state.world.local_size
    device_facts = state.distributed_type.value, state.backend, str(state.device), str(state.default_device)
    return *numbers, *device_facts, state.is_main_process, state.is_last_process


def two_generations() -> dict[str, Any]:
    """Two lives of a rank, the second after all have left the first, and what it hears when another leaves alone."""
    found: dict[str, Any] = {"place": rank_facts()}
    state = PartialState()
    rank = state.process_index
    PartialState().mine = rank  # type: ignore[attr-defined]  # states take whatever they are given
    with state.main_process_first():
        found["state"] = (PartialState().mine, Accelerator().gradient_state.__dict__ is not None)  # type: ignore[attr-defined]
    with state.split_between_processes(["a", "b", "c"]) as share:
        found["share"] = share
    found["only"] = state.on_main_process(lambda: "main")(), state.on_process(lambda: "second", process_index=1)()
    state.wait_for_everyone()
    forget()
    accelerator = Accelerator()
    found["again"] = rank_facts()
    found["fresh"] = not hasattr(PartialState(), "mine")
    accelerator.wait_for_everyone()
    found["lost"] = alone(accelerator, leaves=rank == 1)
    return found


def alone(accelerator: Any, *, leaves: bool) -> str:
    """What a rank is told that waits for one which has gone."""
    if leaves:
        forget()
        gc.collect()
        return "left"
    try:
        accelerator.world.barrier()
    except RuntimeError as error:
        return "lost" if failure_of(error, 0, CellSources({}, {})).lost_connection else str(error)
    return "nothing"


@pytest.fixture(scope="module")
def found(launched_on_xla: Callable[..., list[Any]]) -> list[dict[str, Any]]:
    return launched_on_xla(two_generations, num_processes=2)


def test_each_process_is_a_rank_with_a_device(found: list[dict[str, Any]]) -> None:
    for rank, facts in enumerate(found):
        device_facts = "XLA", "xla", "xla:0", "xla"
        assert facts["place"] == (rank, 2, rank, 2, *device_facts, rank == 0, rank == 1)
        assert facts["state"] == (rank, True)
        assert facts["share"] == [["a", "b"], ["c"]][rank]
        assert facts["only"] == [("main", None), (None, "second")][rank]


def test_a_world_that_was_left_is_joined_anew(found: list[dict[str, Any]]) -> None:
    assert [item["again"] for item in found] == [item["place"] for item in found]
    assert all(item["fresh"] for item in found)


def test_who_waits_for_a_rank_that_has_gone_finds_a_lost_connection(found: list[dict[str, Any]]) -> None:
    assert [item["lost"] for item in found] == ["lost", "left"]


@pytest.mark.parametrize("given", [{}, OF_TORCHRUN], ids=["script", "torchrun"])
def test_one_process_is_one_rank_on_its_device(given: dict[str, str]) -> None:
    assert place_report(given).stdout.strip().endswith("(0, 1, 0, 1, 'XLA', None, 'xla:0', 'xla', True, True)")


def test_devices_that_would_be_threads_of_one_process_are_an_error() -> None:
    assert "torch_xla drives 2 devices in this process" in place_report({"CPU_NUM_DEVICES": "2"}).stderr


def test_a_process_of_torch_xla_s_own_launch_is_a_rank_on_its_device() -> None:
    report = place_report(
        {}, "import torch_xla; from tests.xla import test_world; torch_xla.launch(test_world.prints_place)"
    )
    assert "(0, 1, 0, 1, 'XLA', None, 'xla:0', 'xla', True, True)" in report.stdout, report.stderr


def prints_place(_index: int) -> None:
    print(rank_facts())


def place_report(given: dict[str, str], code: str = PLACE) -> subprocess.CompletedProcess[str]:
    """What a process says of its place."""
    environment = {name: text for name, text in os.environ.items() if name not in (*OF_TORCHRUN, "MASTER_ADDR")}
    environment |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1", **given}
    command = [sys.executable, "-c", code]
    root = Path(__file__).parents[2]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, cwd=root, check=False)
