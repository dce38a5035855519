"""A process finds its place among the others, leaves it, and finds a new one."""

from __future__ import annotations

import copy
import os
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accelerate_nb import InitProcessGroupKwargs
from accelerate_nb.errors import ConfigurationError, LaunchError
from accelerate_nb.runtime.world.registry import current_world, forget, is_joined
from accelerate_nb.runtime.world.world import HostGroup, RankPlace, Rendezvous, World, choose_device
from accelerate_nb.runtime.xla import device as xla
from tests.ranks import run_on_ranks


def seen() -> tuple[int, int, int, int, str, str | None]:
    world = current_world()
    return world.rank, world.size, world.local_rank, world.local_size, str(world.device.type), world.backend


def total() -> float:
    tensor = torch.ones(1, device=current_world().device)
    if current_world().size > 1:
        dist.all_reduce(tensor)
    return tensor.item()


def test_a_process_alone_has_no_group() -> None:
    (facts,) = run_on_ranks(seen, 1)
    assert facts[:4] == (0, 1, 0, 1)
    assert facts[5] is None


def test_ranks_are_connected_with_nothing_set() -> None:
    first, second = run_on_ranks(seen, 2)
    assert (first[:2], second[:2]) == ((0, 2), (1, 2))
    assert first[5] is not None


def joins_again() -> list[float]:
    totals = []
    for _ in range(3):
        totals.append(total())
        forget()
        assert not dist.is_initialized()
        assert not is_joined()
    totals.append(total())
    dist.destroy_process_group()  # by somebody who knows nothing of us
    totals.append(total())
    forget()
    return totals


def test_a_world_that_was_left_can_be_joined_again() -> None:
    assert run_on_ranks(joins_again, 2) == [[2.0] * 5] * 2


def adopts() -> tuple[bool, float]:
    dist.init_process_group("gloo")
    world = current_world()
    found = world.size == 2, total()
    forget()
    assert dist.is_initialized()  # who made it ends it
    dist.destroy_process_group()
    return found


def test_an_existing_group_is_adopted_and_left_alone() -> None:
    assert run_on_ranks(adopts, 2) == [(True, 2.0)] * 2


def forked_worker_and_loader_child() -> tuple[int, int]:
    current_world()
    answers = []
    for changed in ({}, {"RANK": "3", "WORLD_SIZE": "1"}):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.environ.update(changed)
            os.write(writer, b"1" if is_joined() else b"0")
            os._exit(0)
        os.waitpid(pid, 0)
        answers.append(int(os.read(reader, 1)))
    return answers[0], answers[1]


def test_a_child_shares_the_world_unless_it_was_launched_as_a_worker() -> None:
    assert run_on_ranks(forked_worker_and_loader_child, 1) == [(1, 0)]


def test_a_place_is_read_from_torchruns_variables() -> None:
    environment = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert RankPlace.read(environment) == RankPlace(5, 8, 1, 4)
    assert RankPlace.read({}) == RankPlace(0, 1, 0, 1)


@pytest.mark.parametrize(
    ("environment", "error", "message"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, LaunchError, "ranks count from 0 to 1"),
        ({"RANK": "first", "WORLD_SIZE": "2"}, ConfigurationError, "RANK should be a whole number, but is 'first'"),
    ],
)
def test_a_place_that_cannot_be_is_an_error(environment: dict[str, str], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        RankPlace.read(environment)


def test_a_device_can_be_named() -> None:
    assert choose_device(RankPlace(0, 1, 0, 1), {"ACCELERATE_TORCH_DEVICE": "meta"}, cpu=False) == torch.device("meta")
    assert choose_device(RankPlace(0, 1, 0, 1), {"ACCELERATE_TORCH_DEVICE": "meta"}, cpu=True) == torch.device("cpu")


def test_a_backend_for_other_devices_is_replaced() -> None:
    assert Rendezvous(backend="nccl")._backend_for(torch.device("cpu")) == "gloo"
    assert Rendezvous(backend="gloo")._backend_for(torch.device("cuda", 0)) == "gloo"
    assert Rendezvous()._backend_for(torch.device("cuda", 0)) == "nccl"


@pytest.mark.parametrize(("requested", "count"), [({"backend": "nccl"}, 1), ({"backend": "gloo"}, 0), ({}, 0)])
def test_a_backend_that_was_named_and_is_replaced_is_warned_of(requested: dict[str, str], count: int) -> None:
    handler = copy.deepcopy(InitProcessGroupKwargs(timeout=timedelta(seconds=9), **requested))  # type: ignore[arg-type]
    place = RankPlace(rank=0, size=2, local_rank=0, local_size=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        arguments = Rendezvous(**handler.requested())._group_arguments(place, torch.device("cpu"), None)
    assert arguments["backend"] == "gloo"
    assert len(caught) == count
    assert all("backend='nccl' was requested" in str(item.message) for item in caught)


def test_nccl_is_given_the_device_of_the_rank_and_other_backends_are_not() -> None:
    place = RankPlace(rank=3, size=4, local_rank=1, local_size=2)

    def device_id(device: str, backend: str | None = None) -> object:
        return Rendezvous(backend=backend)._group_arguments(place, torch.device(device), None).get("device_id")

    assert device_id("cuda:1") == device_id("cuda:1", "cpu:gloo,cuda:nccl") == torch.device("cuda", 1)
    assert device_id("cuda:1", "gloo") is device_id("cpu") is None


def test_a_world_knows_its_ends() -> None:
    def world(rank: int) -> Any:
        return World(rank, 3, rank, 3, torch.device("cpu"), "gloo")

    assert [(world(rank).is_main, world(rank).is_last) for rank in range(3)] == [
        (True, False),
        (False, False),
        (False, True),
    ]


def meets_at_an_address() -> float:
    """Two ranks talk over an address, whatever the environment says of interfaces."""
    os.environ["GLOO_SOCKET_IFNAME"] = "none0"
    store = Rendezvous().rendezvous()
    hosts = HostGroup(None, "127.0.0.1")
    hosts.connect(int(os.environ["RANK"]), 2, dist.PrefixStore("hosts", store))
    tensor = torch.ones(1)
    hosts.group.allreduce([tensor]).wait()
    return tensor.item()


def test_hosts_of_several_machines_talk_over_the_address_that_the_others_reach() -> None:
    assert run_on_ranks(meets_at_an_address, 2) == [2.0, 2.0]


def test_the_ranks_of_a_pod_meet_at_the_machine_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    # a pod can't be had: what torch_xla would say of one is said here
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr(xla.machine, "is_installed", lambda: True)
    monkeypatch.setattr(xla.machine, "is_awake", lambda: True)
    monkeypatch.setattr(xla, "rank_numbers", lambda: (0, 16, 0, 8))
    monkeypatch.setattr(xla, "address_of_main", lambda: "127.0.0.1")
    store = Rendezvous().rendezvous()
    assert isinstance(store, dist.TCPStore)
    assert store.port == 12355
    assert xla.machine_address() == "127.0.0.1"


def test_the_ranks_of_one_machine_meet_at_the_address_of_their_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla.machine, "is_awake", lambda: True)
    monkeypatch.setattr(xla, "rank_numbers", lambda: (0, 8, 0, 8))
    assert not xla.is_among_machines({"WORLD_SIZE": "8"})
    assert xla.is_among_machines({"WORLD_SIZE": "4"})
    assert not xla.is_among_machines({})
