"""What fits together moves, what doesn't is an error on every process, and nothing hangs or returns what was in memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import accelerate_nb.utils.operations as operations
from accelerate_nb import Accelerator, PartialState
from accelerate_nb.errors import OperationError
from accelerate_nb.runtime.operations.call_check import CallCheck, CollectiveCall
from accelerate_nb.runtime.world.registry import current_world
from tests.ranks import TWO_OR_THREE, run_on_ranks

SECONDS = 20.0


def error_of(call: Callable[[], Any]) -> str:
    try:
        return f"nothing raised, {call()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def misfits() -> list[str]:
    """Calls that differ between processes, each of them after calls that made frames large or small."""
    rank = current_world().rank
    last = rank == current_world().size - 1
    calls: list[Callable[[], Any]] = [
        lambda: operations.gather(torch.ones(3 if last else 2)),
        lambda: operations.gather(torch.ones(30000 if last else 2)),
        lambda: operations.gather(torch.ones(400000 + last)),
        lambda: operations.gather([torch.ones(1)] * (1 + last)),
        lambda: operations.reduce(torch.ones(500000, dtype=torch.float64 if last else torch.float32)),
        lambda: operations.broadcast(torch.ones(2, 3) if last else torch.ones(3, 2)),
        lambda: operations.broadcast(torch.ones(2), from_process=int(last)),
        lambda: operations.gather_object([1]) if last else operations.gather(torch.ones(50000)),
        lambda: operations.broadcast_object_list([1] * (1 + last)),
        lambda: operations.pad_across_processes(torch.ones(2, 2), dim=int(last)),
        lambda: operations.copy_tensor_to_devices(torch.ones(1)),
    ]
    messages = []
    for call in calls:
        messages.append(error_of(call))
        # who has raised goes on with the others, with small tensors and large ones
        for rows in (1, 30000):
            assert operations.gather(torch.full((rows,), rank)).unique().tolist() == list(range(current_world().size))
    return messages


@pytest.mark.parametrize("size", TWO_OR_THREE)
def test_a_mismatch_is_an_error_on_every_process_and_never_a_hang_or_garbage(size: int) -> None:
    for messages in run_on_ranks(misfits, size, limit=SECONDS):
        assert [message for message in messages if not message.startswith("OperationError")] == []
        assert "rank 0: gather(float32[2])" in messages[0]
        assert f"rank {size - 1}: gather(float32[3])" in messages[0]


def interrupted() -> list[Any]:
    world = current_world()
    call, part = CollectiveCall("gather", "something large"), torch.ones(20000)
    exchange = CallCheck(world, call, [part])
    if world.rank == 0:
        exchange.finish()  # rank 1 is interrupted while it waits, and never reads what came
    del exchange
    return [operations.gather(torch.full((rows,), world.rank)).sum().item() for rows in (1, 20000, 1)]


def test_who_is_interrupted_while_waiting_finds_the_others_again() -> None:
    assert run_on_ranks(interrupted, 2, limit=SECONDS) == [[1, 20000, 1]] * 2


def reductions() -> list[Any]:
    mine = torch.tensor([current_world().rank + 1])
    done = [operations.reduce(mine, reduction).tolist() for reduction in ("none", "min", "max", "sum", "mean")]
    return [*done, error_of(lambda: operations.reduce(mine, "avg"))]


def test_a_reduction_does_what_its_name_promises_or_is_an_error() -> None:
    for rank, found in enumerate(run_on_ranks(reductions, 2)):
        assert found[:5] == [[rank + 1], [1], [2], [3], [1.5]]
        assert found[5].startswith("ConfigurationError: reduction='avg' was requested. Known ones are sum, mean")


def copied() -> list[Any]:
    shapes = [(2, 0, 3), (), (70000,), (1, 2)]
    found = []
    for shape in shapes:
        mine = torch.full(shape, 7, dtype=torch.complex64) if current_world().rank else None
        copy = operations.copy_tensor_to_devices(mine)
        found.append((tuple(copy.shape), str(copy.dtype), copy.flatten()[:1].tolist()))
    return found


def test_a_tensor_is_copied_to_all_with_its_dimensions_of_zero() -> None:
    expected = [(2, 0, 3), (), (70000,), (1, 2)]
    for found in run_on_ranks(copied, 2):
        assert [shape for shape, _, _ in found] == expected
        assert [numbers for _, _, numbers in found] == [[], [7], [7], [7]]


def verified(spelling: str) -> list[str]:
    os.environ["ACCELERATE_DEBUG_MODE"] = spelling
    state = PartialState(cpu=True)

    @operations.verify_operation
    def total(tensor: torch.Tensor) -> float:
        return tensor.sum().item()

    @operations.chained_operation
    def outer(tensor: torch.Tensor) -> float:
        return total(tensor=tensor)

    uneven = torch.ones(state.process_index + 1)
    return [str(state.debug), error_of(lambda: outer(uneven)), str(total(torch.ones(2)))]


@pytest.mark.parametrize("spelling", ["1", "true", "yes"])
def test_debug_mode_checks_ones_own_operations_however_it_is_spelled(spelling: str) -> None:
    for debug, message, total in run_on_ranks(verified, 2, spelling):
        assert (debug, total) == ("True", "2.0")
        assert "verified.<locals>.outer could not be done" in message
        assert "rank 0: tests.runtime.operations.test_promises.verified.<locals>.total(float32[1])" in message
        assert "rank 1: tests.runtime.operations.test_promises.verified.<locals>.total(float32[2])" in message


def not_verified() -> str:
    PartialState(cpu=True)

    @operations.verify_operation
    def size(tensor: torch.Tensor) -> int:
        return tensor.numel()

    return error_of(lambda: size(torch.ones(current_world().rank + 1)))


def test_ones_own_operations_are_not_checked_without_debug_mode() -> None:
    assert run_on_ranks(not_verified, 2) == ["nothing raised, 1", "nothing raised, 2"]


def flags() -> list[bool]:
    accelerator = Accelerator()
    found = [accelerator.check_trigger()]
    if accelerator.process_index == 1:
        accelerator.set_trigger()
    found += [accelerator.check_trigger(), accelerator.check_trigger()]
    accelerator.set_trigger()
    return [*found, accelerator.check_trigger(), accelerator.check_trigger()]


def test_a_flag_that_one_process_raises_is_seen_once_by_all() -> None:
    assert run_on_ranks(flags, 2) == [[False, True, False, True, False]] * 2


def test_parameters_are_whole_where_nobody_parts_them() -> None:
    Accelerator(cpu=True)
    weight = torch.nn.Parameter(torch.ones(2))
    with operations.GatheredParameters([weight], modifier_rank=0):
        assert weight.numel() == 2


def test_an_error_of_an_operation_is_accelerates_exception() -> None:
    assert issubclass(operations.DistributedOperationException, Exception)
    assert operations.DistributedOperationException is OperationError
