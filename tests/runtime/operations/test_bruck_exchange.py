"""Rows reach all processes over sockets and over gloo; what differs, ends or is missing is an error, and never a wrong number."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import accelerate_nb.utils.operations as operations
from accelerate_nb.runtime.operations import bruck_exchange, peer_messages
from accelerate_nb.runtime.operations.bruck_exchange import exchange_of
from accelerate_nb.runtime.operations.call_check import CallCheck, CollectiveCall, agree
from accelerate_nb.runtime.operations.peer_messages import GlooMessages, Listener, SocketMessages, Step
from accelerate_nb.runtime.operations.transfer import TensorMover
from accelerate_nb.runtime.world.registry import current_world
from accelerate_nb.runtime.world.world import HostGroup, Rendezvous, XlaWorld
from tests.ranks import TWO_OR_THREE, run_on_ranks

SECONDS = 60.0
# What travels behind the head, what goes over sockets afterwards, and what gloo moves.
SMALL, LARGE, LARGEST = 5, 200_000, 3_000_000
FIVE = pytest.param(5, marks=pytest.mark.slow)


def over(messages: type) -> None:
    """Have the ranks send their rows in this way; over gloo as ranks of several machines do."""
    if messages is GlooMessages:
        peer_messages._machine = lambda: os.getpid().to_bytes(16, "little")  # type: ignore[assignment]
    assert type(exchange_of(current_world())._messages) is messages


def outcome(call: Callable[[], Any]) -> str:
    try:
        return f"returned {call()}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def everything(messages: type) -> list[Any]:
    over(messages)
    rank, size = current_world().rank, current_world().size
    found: list[Any] = []
    for length in (SMALL, LARGE, LARGEST):
        mine = torch.full((length,), rank + 1.0)
        found.append(operations.gather(mine)[::length].tolist())
        found.append(operations.reduce(mine, "sum").unique().tolist())
        found += [operations.broadcast(mine, source).unique().tolist() for source in range(size)]
    found.append([text[:2] for text in operations.gather_object([f"{rank} " * length for length in (1, 90_000)])])
    leaves = [torch.full((15_000,), 10.0 * rank + leaf) for leaf in range(4)]
    return [*found, [leaf.unique().item() for leaf in operations.broadcast(leaves, size - 1)]]


@pytest.mark.parametrize("messages", [SocketMessages, GlooMessages])
@pytest.mark.parametrize("size", [*TWO_OR_THREE, FIVE])
def test_all_processes_receive_what_each_has(size: int, messages: type) -> None:
    ranks = [rank + 1.0 for rank in range(size)]
    of_length = [ranks, [sum(ranks)], *([rank] for rank in ranks)]
    texts = [f"{rank} " for rank in range(size) for _ in range(2)]
    leaves = [10.0 * (size - 1) + leaf for leaf in range(4)]
    assert run_on_ranks(everything, size, messages, limit=SECONDS) == [[*of_length * 3, texts, leaves]] * size


def differs_after_agreement(messages: type) -> list[str]:
    over(messages)
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


@pytest.mark.parametrize("messages", [SocketMessages, GlooMessages])
@pytest.mark.parametrize("size", [*TWO_OR_THREE, FIVE])
def test_a_call_that_differs_after_equal_ones_is_an_error_on_all(size: int, messages: type) -> None:
    for found in run_on_ranks(differs_after_agreement, size, messages, limit=SECONDS):
        assert [message for message in found if not message.startswith("OperationError")] == []
        assert "rank 0: gather(float32[4])" in found[0]
        assert f"rank {size - 1}: reduce mean(float32[4])" in found[0]


def ends(length: int) -> str:
    over(SocketMessages)
    if current_world().rank == 1:
        dist.destroy_process_group()
        return ""
    return outcome(lambda: operations.gather(torch.ones(length)))


def test_a_process_that_has_ended_is_an_error_on_those_that_wait_for_it() -> None:
    assert "Connection closed by peer: rank 1" in run_on_ranks(ends, 2, SMALL, limit=SECONDS)[0]


def calls_nothing(messages: type) -> list[str]:
    current_world(Rendezvous(cpu=True, timeout=timedelta(seconds=1)))
    over(messages)
    rank, store = current_world().rank, current_world().store
    found = outcome(lambda: operations.gather(torch.ones(2))) if rank == 0 else ""
    store.set(f"{rank} waited", "")
    store.wait([f"{1 - rank} waited"], timedelta(seconds=SECONDS))
    return [found, outcome(lambda: operations.reduce(torch.full((2,), 7.0))) if messages is SocketMessages else ""]


@pytest.mark.parametrize("messages", [SocketMessages, GlooMessages])
def test_a_process_that_calls_nothing_is_an_error_when_the_groups_timeout_is_over(messages: type) -> None:
    (waited, _), _ = run_on_ranks(calls_nothing, 2, messages, limit=SECONDS)
    assert "Timed out waiting" in waited


def test_who_comes_after_a_timeout_learns_what_the_others_called() -> None:
    (_, after), (_, late) = run_on_ranks(calls_nothing, 2, SocketMessages, limit=SECONDS)
    assert late.startswith("OperationError")
    assert "rank 0: gather(float32[2])" in late
    assert not after.startswith("returned")


def interrupted() -> list[str]:
    over(SocketMessages)
    if current_world().rank == 1:
        receive = SocketMessages._receive

        def receive_some(messages: SocketMessages) -> None:
            receive(messages)
            if len(messages._awaited) > LARGE:
                os.kill(os.getpid(), signal.SIGINT)

        SocketMessages._receive = receive_some  # type: ignore[method-assign]
    mine = torch.full((LARGE,), 1.0)
    return [outcome(lambda: operations.gather(mine).sum()), outcome(lambda: operations.gather(mine).sum())]


def test_no_call_after_an_interrupted_transfer_takes_what_is_left_of_it() -> None:
    first, second = run_on_ranks(interrupted, 2, limit=SECONDS)
    assert second[0].startswith("KeyboardInterrupt")
    # to rank 0 everything may have come
    assert first[0] == f"returned {2.0 * LARGE}" or not first[0].startswith("returned")
    assert [text for text in (first[1], second[1]) if text.startswith("returned")] == []


def first_in_inference_mode() -> list[Any]:
    with torch.inference_mode():
        inside = operations.gather(torch.ones(2)).sum().item()
    weight = torch.ones(2, requires_grad=True)
    operations.reduce(weight * 3, "sum").sum().backward()
    return [inside, operations.gather(torch.ones(2)).sum().item(), weight.grad.tolist()]  # type: ignore[union-attr]


def test_calls_in_inference_mode_and_outside_of_it_share_their_memory() -> None:
    assert run_on_ranks(first_in_inference_mode, 2) == [[4.0, 4.0, [3.0, 3.0]]] * 2


def connected(strangers: int) -> list[bool]:
    """Whether two processes of this machine have connected, to whom strangers have spoken before."""
    listeners = [Listener(), Listener()]
    addresses = [listener.address for listener in listeners]
    sockets: list[Any] = [None, None]

    def connect(rank: int) -> None:
        sockets[rank] = listeners[rank].connect(rank, [Step(1 - rank, 1 - rank)], addresses)

    for _ in range(strangers):
        _, _, port = Listener.address_format.unpack(addresses[0])
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"another secret".ljust(16) + (1).to_bytes(8, "little"))
    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    pairs = [pair for step in sockets for pair in (step or {}).values()]
    if len(pairs) == 2:
        pairs[0][0].sendall(b"first")
        assert pairs[1][1].recv(5) == b"first"
    for connection in [connection for pair in pairs for connection in pair]:
        connection.close()
    return [step is not None for step in sockets]


@pytest.mark.parametrize("strangers", [0, 2])
def test_a_stranger_without_the_secret_is_left_out(strangers: int) -> None:
    assert connected(strangers) == [True, True]


def skips_its_data() -> list[str]:
    over(SocketMessages)
    mine = torch.full((LARGE,), 1.0)
    if current_world().rank == 0:
        return [outcome(lambda: operations.gather(mine).sum()), outcome(lambda: operations.gather(mine).sum())]
    CallCheck(current_world(), CollectiveCall("gather", f"float32[{LARGE}]"), [mine], 0).finish()
    # an interrupt came, and what this process does next is of the same length as the data that rank 0 waits for
    return [outcome(lambda: operations.gather(torch.full((8_000,), 7.0)).sum()) for _ in range(30)]


def test_nothing_is_taken_for_the_data_of_a_process_that_was_interrupted_before_it_sent_them() -> None:
    first, second = run_on_ranks(skips_its_data, 2, limit=SECONDS)
    assert "Connection closed: rank 1 was interrupted before it sent its data" in first[0]
    assert [text for text in (*first, *second) if text.startswith("returned")] == []


def beside_another_backend() -> list[Any]:
    """What a check gives over the group that is made where the ranks' own does not connect their hosts, as NCCL's."""
    bruck_exchange._talks_over_gloo = lambda _: False  # type: ignore[assignment]
    rank = current_world().rank
    found = operations.gather(torch.tensor([rank])).tolist()
    misfit = outcome(lambda: operations.gather(torch.ones(rank + 1)))
    return [found, "rank 1: gather(float32[2])" in misfit, operations.gather_object([rank])]


def test_calls_are_compared_over_a_group_beside_one_that_connects_devices() -> None:
    assert run_on_ranks(beside_another_backend, 2, limit=SECONDS) == [[[0, 1], True, [0, 1]]] * 2


def between_hosts() -> list[Any]:
    """What the hosts of XLA devices exchange, and whether their sockets go with their connection."""
    rank, store = int(os.environ["RANK"]), Rendezvous(cpu=True).rendezvous()
    hosts = HostGroup(timedelta(seconds=SECONDS), "127.0.0.1")
    hosts.connect(rank, 2, dist.PrefixStore("hosts", store))
    world = XlaWorld(rank, 2, rank, 2, torch.device("cpu"), "xla", hosts)
    agree(world, CollectiveCall("a check", "equal"))
    misfit = outcome(lambda: agree(world, CollectiveCall("a check", f"of rank {rank}")))
    mover, call = TensorMover(world.exchange_world), CollectiveCall("gather", "a tensor")
    found = [mover.gather(call, [torch.full((length,), rank)])[0].sum().item() for length in (SMALL, LARGE)]
    exchange = weakref.ref(exchange_of(world))
    hosts.group = None
    gc.collect()
    return [*found, "rank 1: a check(of rank 1)" in misfit, exchange()]


def test_the_hosts_of_xla_devices_compare_their_calls_and_part() -> None:
    assert run_on_ranks(between_hosts, 2, limit=SECONDS) == [[SMALL, LARGE, True, None]] * 2
