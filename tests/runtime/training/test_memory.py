"""Memory is given back, and a batch that is too large is made smaller everywhere."""

from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_nb import Accelerator, PartialState
from accelerate_nb.config.environment import attempt_variables
from accelerate_nb.errors import StateError
from accelerate_nb.utils.memory import find_executable_batch_size, release_memory, should_reduce_batch_size
from tests.peers import Peer, under_both
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


def test_an_own_way_to_shrink_is_taken() -> None:
    sizes = iter([5, 3])

    @find_executable_batch_size(starting_batch_size=8, reduce_batch_size_fn=lambda: next(sizes))
    def train(batch_size: int) -> int:
        return batch_size if batch_size == 3 else too_large()

    assert train() == 3


def test_the_next_attempt_of_a_run_begins_with_a_size_that_was_not_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_nothing_that_fits_is_an_error() -> None:
    @find_executable_batch_size(starting_batch_size=2)
    def train(batch_size: int) -> Any:
        too_large()

    with pytest.raises(StateError, match="No executable batch size found, reached zero"):
        train()


def test_another_error_stays_what_it_is() -> None:
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


def test_released_objects_become_nothing() -> None:
    first, second = release_memory(torch.ones(2), [])
    assert first is None
    assert second is None


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (torch.OutOfMemoryError("anything"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("shapes cannot be multiplied"), False),
        (ValueError(" out of memory."), False),
    ],
)
def test_errors_of_memory_are_distinguished_from_others(error: Exception, answer: bool) -> None:
    assert should_reduce_batch_size(error) is answer


def shrinking(peer: Peer) -> list[Any]:
    """The sizes that are tried, and what comes of it."""
    memory = peer.door("utils.memory")
    tried: list[int] = []

    @memory.find_executable_batch_size(starting_batch_size=100)
    def train(batch_size: int, fits: int) -> int:
        tried.append(batch_size)
        if batch_size > fits:
            raise RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)")
        return batch_size

    fitting = train(60)
    given = [memory.should_reduce_batch_size(error) for error in ERRORS]
    return [fitting, tried, given, memory.release_memory(torch.ones(1), 2)]


ERRORS = [
    RuntimeError("CUDA out of memory. Tried"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."),
    RuntimeError("FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed"),
    RuntimeError("CUDA out of memory. Tried", 2),
    RuntimeError("anything"),
    KeyError(" out of memory."),
]


@pytest.mark.slow
def test_sizes_and_errors_are_accelerates() -> None:
    both = under_both(shrinking, 1)
    assert both.ours == both.theirs
    assert both.ours[0][0] == 57


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
