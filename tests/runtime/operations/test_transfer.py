"""What processes send reaches all of them; what differs, ends or is missing is an error, and never a wrong number."""

import gc
import weakref
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

import accelerate_nb.utils.operations as operations
from accelerate_nb.runtime.operations import transfer
from accelerate_nb.runtime.operations.transfer import CallCheck, CollectiveCall, TensorMover, agree, exchange_of
from accelerate_nb.runtime.world.registry import Rendezvous, current_world, forget
from accelerate_nb.runtime.xla.world import XlaWorld
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


# Calls by what an error names them.
CALLS: dict[str, Callable[[], Any]] = {
    "gather(float32[4])": lambda: operations.gather(torch.ones(4)),
    "gather(float32[3])": lambda: operations.gather(torch.ones(3)),
    f"gather(float32[{LARGEST}])": lambda: operations.gather(torch.ones(LARGEST)),
    "gather([float32[1]])": lambda: operations.gather([torch.ones(1)]),
    "gather([float32[1], float32[1]])": lambda: operations.gather([torch.ones(1)] * 2),
    "gather([str])": lambda: operations.gather(["text"]),
    "gather({'b': float32[1]})": lambda: operations.gather({"b": torch.ones(1)}),
    "gather({'a': float32[1]})": lambda: operations.gather({"a": torch.ones(1)}),
    "reduce mean(float32[4])": lambda: operations.reduce(torch.ones(4)),
    "reduce sum(float32[4])": lambda: operations.reduce(torch.ones(4), "sum"),
    f"reduce mean(float32[{LARGE}])": lambda: operations.reduce(torch.ones(LARGE)),
    f"reduce mean(float64[{LARGE}])": lambda: operations.reduce(torch.ones(LARGE, dtype=torch.float64)),
    "broadcast from process 0(float32[2, 3])": lambda: operations.broadcast(torch.ones(2, 3)),
    "broadcast from process 0(float32[3, 2])": lambda: operations.broadcast(torch.ones(3, 2)),
    "broadcast from process 1(float32[3, 2])": lambda: operations.broadcast(torch.ones(3, 2), 1),
    "gather_object(objects)": lambda: operations.gather_object("text"),
    "broadcast_object_list of 1 from process 0(objects)": lambda: operations.broadcast_object_list([1]),
    "broadcast_object_list of 2 from process 0(objects)": lambda: operations.broadcast_object_list([1, 1]),
    "pad_across_processes(dim=0, tensor of 1 dimensions)": lambda: operations.pad_across_processes(torch.ones(1)),
    "pad_across_processes(dim=0, tensor of 2 dimensions)": lambda: operations.pad_across_processes(torch.ones(1, 1)),
    "pad_across_processes(dim=1, tensor of 2 dimensions)": lambda: operations.pad_across_processes(torch.ones(1, 1), 1),
}


def differ() -> list[tuple[str, str, str]]:
    """What is raised where the last rank makes another call than the others, who go on together afterwards."""
    rank, size = current_world().rank, current_world().size
    found = []
    for of_others, of_the_last in pairwise(CALLS):
        for _ in range(3):
            operations.gather(torch.ones(4))
            operations.broadcast(torch.ones(LARGE))
        message = outcome(CALLS[of_the_last if rank == size - 1 else of_others])
        found.append((of_others, of_the_last, message))
        assert operations.gather(torch.tensor([rank])).tolist() == list(range(size))
    return found


@pytest.mark.parametrize("size", [*TWO_OR_THREE, FIVE])
def test_calls_that_differ_are_an_error_on_all_that_names_what_each_rank_called(size: int) -> None:
    for found in run_on_ranks(differ, size, limit=SECONDS):
        for of_others, of_the_last, message in found:
            assert message.startswith("OperationError")
            assert f"\n  rank 0: {of_others}\n" in message
            assert f"\n  rank {size - 1}: {of_the_last}\n" in message


def ends(length: int) -> str:
    operations.gather(torch.ones(1))  # both are connected
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
    transfer._gloo_of = lambda _: None  # type: ignore[assignment]
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
