"""What processes send reaches all of them; what differs, ends or is missing is an error, and never a wrong number."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import accelerate_nb.utils.operations as operations
from accelerate_nb.runtime.operations import call_check
from accelerate_nb.runtime.operations.call_check import CollectiveCall, agree, exchange_of
from accelerate_nb.runtime.operations.transfer import TensorMover
from accelerate_nb.runtime.world.registry import current_world, forget
from accelerate_nb.runtime.world.world import Rendezvous, XlaWorld
from tests.ranks import TWO_OR_THREE, run_on_ranks

SECONDS = 60.0
# What travels with the check at most sizes, and what follows it: with others of its type, or alone.
SMALL, LARGE, LARGEST = 5, 200_000, 3_000_000
FIVE = pytest.param(5, marks=pytest.mark.slow)


def outcome(call: Callable[[], Any]) -> str:
    try:
        return f"returned {call()}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def everything() -> list[Any]:
    rank, size = current_world().rank, current_world().size
    found: list[Any] = []
    for length in (SMALL, LARGE, LARGEST):
        mine = torch.full((length,), rank + 1.0)
        found.append(operations.gather(mine)[::length].tolist())
        found.append(operations.reduce(mine, "sum").unique().tolist())
        found += [operations.broadcast(mine, source).unique().tolist() for source in range(size)]
    mine = [f"{rank} " * length for length in (1, 900_000)]
    found.append([text[:2] for text in operations.gather_object(mine)])
    return [*found, [text[:2] for text in operations.broadcast_object_list(mine, size - 1)]]


@pytest.mark.parametrize("size", [*TWO_OR_THREE, FIVE])
def test_all_processes_receive_what_each_has(size: int) -> None:
    ranks = [rank + 1.0 for rank in range(size)]
    of_length = [ranks, [sum(ranks)], *([rank] for rank in ranks)]
    texts = [f"{rank} " for rank in range(size) for _ in range(2)]
    assert run_on_ranks(everything, size, limit=SECONDS) == [[*of_length * 3, texts, texts[-2:]]] * size


def nested() -> list[Any]:
    """The leaves of a nest after each operation: shape, numbers, and whether the memory is a leaf's own."""
    rank, size = current_world().rank, current_world().size
    nest = {
        "long": [torch.full((50, 2_000), 10 * number + rank) for number in range(3)],
        "float": torch.full((200_000,), 0.5 + rank).view(-1, 2).t(),
        "double": (torch.full((), 100.0 + rank, dtype=torch.float64), torch.empty(0, 3)),
    }
    found = []
    for done in (operations.gather(nest), operations.reduce(nest, "sum"), operations.broadcast(nest, size - 1)):
        leaves = [*done["long"], done["float"], *done["double"]]
        is_alone = all(leaf.untyped_storage().nbytes() == leaf.nbytes for leaf in leaves)
        found.append([[list(leaf.shape), leaf.unique().tolist()] for leaf in leaves] + [is_alone])
    return found


@pytest.mark.parametrize("size", [*TWO_OR_THREE, FIVE])
def test_leaves_of_any_size_and_type_come_back_as_they_were_nested(size: int) -> None:
    numbers, lone = [0, 10, 20], range(size)
    shapes: list[Any] = [[50, 2_000], [50, 2_000], [50, 2_000], [2, 100_000], [], [0, 3]]
    joined = [[50 * size, 2_000]] * 3 + [[2 * size, 100_000], [size], [0, 3]]
    of_leaves = [*numbers, 0.5, 100]
    gathered = [[first + rank for rank in lone] for first in of_leaves] + [[]]
    summed = [[first * size + sum(lone)] for first in of_leaves] + [[]]
    sent = [[first + size - 1] for first in of_leaves] + [[]]
    expected = [
        [*([shape, values] for shape, values in zip(there, found, strict=True)), True]
        for there, found in ((joined, gathered), (shapes, summed), (shapes, sent))
    ]
    assert run_on_ranks(nested, size, limit=SECONDS) == [expected] * size


def differs_after_agreement() -> list[str]:
    rank = current_world().rank
    last = rank == current_world().size - 1
    agreed: list[Callable[[], Any]] = [
        lambda: operations.gather(torch.ones(4)),
        lambda: operations.reduce(torch.ones(LARGE)),
        lambda: operations.broadcast(torch.ones(4)),
    ]
    differing: list[Callable[[], Any]] = [
        lambda: operations.reduce(torch.ones(4)) if last else operations.gather(torch.ones(4)),
        lambda: operations.gather(torch.ones(60_000 if last else 4)),
        lambda: operations.gather(torch.ones(4 if last else 60_000)),
        lambda: operations.reduce(torch.ones(LARGE, dtype=torch.int32 if last else torch.float32)),
        lambda: operations.broadcast(torch.ones(4), int(last)),
        lambda: operations.broadcast(torch.ones(LARGEST if last else 4)),
        lambda: operations.gather_object("text") if last else operations.broadcast(torch.ones(LARGE)),
    ]
    messages_of_errors = []
    for call in differing:
        for _ in range(3):
            [same() for same in agreed]
        messages_of_errors.append(outcome(call))
        assert operations.gather(torch.tensor([rank])).tolist() == list(range(current_world().size))
    return messages_of_errors


@pytest.mark.parametrize("size", [*TWO_OR_THREE, FIVE])
def test_a_call_that_differs_after_equal_ones_is_an_error_on_all(size: int) -> None:
    for found in run_on_ranks(differs_after_agreement, size, limit=SECONDS):
        assert [message for message in found if not message.startswith("OperationError")] == []
        assert "rank 0: gather(float32[4])" in found[0]
        assert f"rank {size - 1}: reduce mean(float32[4])" in found[0]


def ends(length: int) -> str:
    if current_world().rank == 1:
        dist.destroy_process_group()
        return ""
    return outcome(lambda: operations.gather(torch.ones(length)))


def test_a_process_that_has_ended_is_an_error_on_those_that_wait_for_it() -> None:
    assert " by peer" in run_on_ranks(ends, 2, SMALL, limit=SECONDS)[0]  # the connection was closed, or reset


def calls_nothing() -> str:
    current_world(Rendezvous(cpu=True, timeout=timedelta(seconds=1)))
    rank, store = current_world().rank, current_world().store
    found = outcome(lambda: operations.gather(torch.ones(2))) if rank == 0 else ""
    store.set(f"{rank} waited", "")
    store.wait([f"{1 - rank} waited"], timedelta(seconds=SECONDS))
    return found


def test_a_process_that_calls_nothing_is_an_error_when_the_groups_timeout_is_over() -> None:
    assert "Timed out waiting" in run_on_ranks(calls_nothing, 2, limit=SECONDS)[0]


def first_in_inference_mode() -> list[Any]:
    with torch.inference_mode():
        inside = operations.gather(torch.ones(2)).sum().item()
    weight = torch.ones(2, requires_grad=True)
    operations.reduce(weight * 3, "sum").sum().backward()
    return [inside, operations.gather(torch.ones(2)).sum().item(), weight.grad.tolist()]  # type: ignore[union-attr]


def test_calls_in_inference_mode_and_outside_of_it_share_their_memory() -> None:
    assert run_on_ranks(first_in_inference_mode, 2) == [[4.0, 4.0, [3.0, 3.0]]] * 2


def beside_another_backend() -> list[Any]:
    """What a check gives over the group that is made where the ranks' own does not connect their hosts, as NCCL's."""
    call_check._gloo_of = lambda _: None  # type: ignore[assignment]
    rank = current_world().rank
    found = operations.gather(torch.tensor([rank])).tolist()
    misfit = outcome(lambda: operations.gather(torch.ones(rank + 1)))
    return [found, "rank 1: gather(float32[2])" in misfit, operations.gather_object([rank])]


def test_calls_are_compared_over_a_group_beside_one_that_connects_devices() -> None:
    assert run_on_ranks(beside_another_backend, 2, limit=SECONDS) == [[[0, 1], True, [0, 1]]] * 2


def between_hosts() -> list[Any]:
    """What the hosts of XLA devices exchange, and whether their exchange goes with their group."""
    rank = current_world().rank
    world = XlaWorld(rank, 2, rank, 2, torch.device("cpu"), "xla")
    agree(world, CollectiveCall("a check", "equal"))
    misfit = outcome(lambda: agree(world, CollectiveCall("a check", f"of rank {rank}")))
    mover, call = TensorMover(world.exchange_world), CollectiveCall("gather", "a tensor")
    found = [mover.gather(call, [torch.full((length,), rank)])[0].sum().item() for length in (SMALL, LARGE)]
    exchange = weakref.ref(exchange_of(world))
    forget()
    gc.collect()
    return [*found, "rank 1: a check(of rank 1)" in misfit, exchange()]


def test_the_hosts_of_xla_devices_compare_their_calls_and_part() -> None:
    assert run_on_ranks(between_hosts, 2, limit=SECONDS) == [[SMALL, LARGE, True, None]] * 2
