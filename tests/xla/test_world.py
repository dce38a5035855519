"""A rank that computes through torch_xla knows its place, however its process came to be, and shares its state with no other rank."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accelerate_nb import Accelerator, PartialState
from accelerate_nb.runtime.world.registry import forget
from accelerate_nb.sources.cells import CellSources
from accelerate_nb.transport.outcome import failure_of
from tests.processes import python

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


def test_each_process_is_a_rank_with_a_device_in_each_of_its_worlds(on_xla: Callable[..., list[Any]]) -> None:
    found = on_xla(two_generations, num_processes=2)
    for rank, facts in enumerate(found):
        device_facts = "XLA", "xla", "xla:0", "xla"
        assert facts["place"] == (rank, 2, rank, 2, *device_facts, rank == 0, rank == 1)
        assert facts["state"] == (rank, True)
        assert facts["share"] == [["a", "b"], ["c"]][rank]
        assert facts["only"] == [("main", None), (None, "second")][rank]

    # a world that was left is joined anew, and who waits for a rank that has gone finds a lost connection
    assert [item["again"] for item in found] == [item["place"] for item in found]
    assert all(item["fresh"] for item in found)
    assert [item["lost"] for item in found] == ["lost", "left"]


BY_TORCH_XLA = "import torch_xla; from tests.xla import test_world; torch_xla.launch(test_world.prints_place)"


@pytest.mark.parametrize(
    ("given", "code"), [({}, PLACE), (OF_TORCHRUN, PLACE), ({}, BY_TORCH_XLA)], ids=["script", "torchrun", "torch_xla"]
)
def test_one_process_is_one_rank_on_its_device(given: dict[str, str], code: str) -> None:
    report = place_report(given, code)
    assert "(0, 1, 0, 1, 'XLA', None, 'xla:0', 'xla', True, True)" in report.stdout, report.stderr


def test_devices_that_would_be_threads_of_one_process_are_an_error() -> None:
    assert "torch_xla drives 2 devices in this process" in place_report({"CPU_NUM_DEVICES": "2"}).stderr


def prints_place(_index: int) -> None:
    print(rank_facts())


def place_report(given: dict[str, str], code: str = PLACE) -> Any:
    """What a process says of its place; `tests/conftest.py` has taken a launcher's variables away."""
    variables = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1", **given}
    return python("-c", code, folder=Path(__file__).parents[2], **variables)
