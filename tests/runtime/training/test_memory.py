"""Memory is given back, and a batch that is too large is made smaller everywhere."""

from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_nb import Accelerator, PartialState
from accelerate_nb.config.environment import attempt_variables
from accelerate_nb.errors import StateError
from accelerate_nb.utils.memory import find_executable_batch_size, release_memory, should_reduce_batch_size
from tests.ranks import run_on_ranks


def too_large() -> Any:
    raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")


def test_a_batch_shrinks_until_it_fits() -> None:
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=16)
    def train(batch_size: int, word: str) -> str:
        tried.append(batch_size)
        return f"{word} {batch_size}" if batch_size <= 10 else too_large()

    assert train("fits at") == "fits at 10"
    assert tried == [16, 14, 12, 10]
    assert train("again") == "again 10"
    assert tried[4] == 16  # a call begins anew: what was too large for one model may fit another
    sizes = iter([5, 3])

    @find_executable_batch_size(starting_batch_size=8, reduce_batch_size_fn=lambda: next(sizes))
    def in_its_own_way(batch_size: int) -> int:
        return batch_size if batch_size == 3 else too_large()

    assert in_its_own_way() == 3


def test_the_next_attempt_begins_with_a_size_that_fitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=16)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        if batch_size > 12:
            too_large()
        if len(tried) == 3:
            raise ConnectionResetError
        return batch_size

    for name, value in attempt_variables(tmp_path, 0).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConnectionResetError):
        train()
    assert train() == 12
    assert tried == [16, 14, 12, 16, 14, 12]  # within an attempt each call begins anew
    monkeypatch.setenv("ACCELERATE_NB_ATTEMPT", "1")
    assert train() == 12
    assert tried[6:] == [12]


def test_nothing_that_fits_is_an_error_and_another_error_stays_what_it_is() -> None:
    nothing = find_executable_batch_size(lambda batch_size: too_large(), starting_batch_size=2)
    with pytest.raises(StateError, match="No executable batch size found, reached zero"):
        nothing()

    @find_executable_batch_size
    def train(batch_size: int) -> Any:
        raise KeyError(batch_size)

    with pytest.raises(KeyError, match="128"):
        train()
    with pytest.raises(TypeError, match="Leave it out"):
        train(128)


def fits_elsewhere() -> list[int]:
    state = PartialState()
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=10)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        return batch_size if state.process_index == 0 or batch_size < 9 else too_large()

    train()
    return tried


def test_all_processes_take_the_size_that_fits_on_each() -> None:
    assert run_on_ranks(fits_elsewhere, 2) == [[10, 9, 8]] * 2


def test_released_objects_become_nothing_and_errors_of_memory_are_known() -> None:
    assert release_memory(torch.ones(2), []) == [None, None]
    assert should_reduce_batch_size(torch.OutOfMemoryError("anything"))
    for message in (
        "MPS backend out of memory (MPS",
        # XLA's
        "Bad StatusOr access: RESOURCE_EXHAUSTED: Error loading program: Attempting to reserve 12.59G.",
        "Compile permanent error. Ran out of memory in memory space hbm. Used 21.1G of 15.48G hbm.",
        "Out of memory allocating 4503599627370496 bytes.",
    ):
        assert should_reduce_batch_size(RuntimeError(message))


def too_large_while_another_gathers() -> Any:
    accelerator = Accelerator()
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=10)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        if accelerator.process_index == 0 and batch_size > 8:
            too_large()
        return int(accelerator.gather(torch.ones(batch_size)).sum())

    return [train(), tried]


def test_a_process_that_waits_for_one_without_memory_takes_the_smaller_size_too() -> None:
    assert run_on_ranks(too_large_while_another_gathers, 2) == [[16, [10, 9, 8]]] * 2
