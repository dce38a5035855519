"""A process finds its place among the others and in a mesh, leaves it, and finds a new one, also after a failure."""

import copy
import itertools
import os
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accelerate_nb import Accelerator, ConfigurationError, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate_nb.errors import LaunchError
from accelerate_nb.runtime.world import registry
from accelerate_nb.runtime.world.registry import Rendezvous, choose_device, current_world, forget, is_joined
from accelerate_nb.runtime.world.state import PartialState
from accelerate_nb.runtime.world.world import Mesh, rank_numbers
from accelerate_nb.runtime.xla import device as xla
from tests.ranks import run_on_ranks


def seen() -> tuple[int, int, int, int, str | None]:
    world = current_world()
    return world.rank, world.size, world.local_rank, world.local_size, world.backend


def total() -> float:
    tensor = torch.ones(1, device=current_world().device)
    if current_world().size > 1:
        dist.all_reduce(tensor)
    return tensor.item()


def test_ranks_are_connected_with_nothing_set_and_a_process_alone_has_no_group() -> None:
    assert run_on_ranks(seen, 1) == [(0, 1, 0, 1, None)]
    first, second = run_on_ranks(seen, 2)
    assert (first[:2], second[:2]) == ((0, 2), (1, 2))
    assert first[4] is not None


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
    assert rank_numbers(environment) == (5, 8, 1, 4)
    assert rank_numbers({}) == (0, 1, 0, 1)

    with pytest.raises(LaunchError, match="ranks count from 0 to 1"):
        rank_numbers({"RANK": "2", "WORLD_SIZE": "2"})
    with pytest.raises(ConfigurationError, match="RANK should be a whole number, but is 'first'"):
        rank_numbers({"RANK": "first", "WORLD_SIZE": "2"})


def test_a_device_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device(1, 0, {"ACCELERATE_TORCH_DEVICE": "meta"}, cpu=False) == torch.device("meta")
    assert choose_device(1, 0, {"ACCELERATE_TORCH_DEVICE": "meta"}, cpu=True) == torch.device("cpu")
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cuda")  # without an index
    forget()
    state = PartialState()
    state.set_device()
    assert state.device == torch.device("cuda")
    forget()


@pytest.mark.parametrize(("requested", "count"), [({"backend": "nccl"}, 1), ({"backend": "gloo"}, 0), ({}, 0)])
def test_a_backend_that_was_named_and_is_replaced_is_warned_of(requested: dict[str, str], count: int) -> None:
    handler = copy.deepcopy(InitProcessGroupKwargs(timeout=timedelta(seconds=9), **requested))  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        arguments = Rendezvous(**handler.requested())._group_arguments(0, 2, torch.device("cpu"), None)
    assert arguments["backend"] == "gloo"
    assert len(caught) == count
    assert all("backend='nccl' was requested" in str(item.message) for item in caught)


def test_nccl_is_given_the_device_of_the_rank_and_other_backends_are_not() -> None:
    def device_id(device: str, backend: str | None = None) -> object:
        return Rendezvous(backend=backend)._group_arguments(3, 4, torch.device(device), None).get("device_id")

    assert device_id("cuda:1") == device_id("cuda:1", "cpu:gloo,cuda:nccl") == torch.device("cuda", 1)
    assert device_id("cuda:1", "gloo") is device_id("cpu") is None
    given = {"device_id": torch.device("cuda", 3), "pg_options": object()}
    arguments = Rendezvous(others=given)._group_arguments(3, 4, torch.device("cuda:1"), None)
    assert arguments.items() >= given.items()


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
    assert xla.pod_interface() == "lo"


def test_processes_of_a_tpu_that_torch_xla_does_not_connect_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, answer in [("device", torch.device("cpu")), ("devices_in_process", 1), ("device_type", "TPU")]:
        monkeypatch.setattr(xla, name, lambda answer=answer: answer)
    monkeypatch.setattr(xla.machine, "is_installed", lambda: True)
    monkeypatch.setattr(xla, "rank_numbers", lambda: (0, 1, 0, 1))
    with pytest.raises(LaunchError, match="torch_xla knows of 1 rank"):
        Rendezvous().join({"WORLD_SIZE": "2", "PJRT_DEVICE": "TPU"})


def test_the_ranks_of_one_machine_meet_at_the_address_of_their_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla.machine, "is_awake", lambda: True)
    monkeypatch.setattr(xla, "rank_numbers", lambda: (0, 8, 0, 8))
    assert not xla.is_among_machines({"WORLD_SIZE": "8"})
    assert xla.is_among_machines({"WORLD_SIZE": "4"})
    assert not xla.is_among_machines({})


def gradient(model, rank):
    model.zero_grad()
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def trains_on(kwargs):
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**kwargs)])
    torch.manual_seed(0)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    rank, group = accelerator.process_index, dist.group.WORLD
    before = gradient(model, rank)
    for number in range(3):
        registry.rebuild_groups(f"{number}")
        assert dist.group.WORLD is not group
        after = gradient(model, rank)
        assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    gathered = accelerator.gather(torch.tensor([rank]))
    accelerator.end_training()
    return after[0].tolist(), gathered.tolist(), accelerator.process_index


@pytest.mark.parametrize("options", [{}, {"comm_hook": "fp16", "gradient_as_bucket_view": True}], ids=str)
def test_prepared_models_and_their_accelerator_go_on_also_with_gradients_that_are_packed_for_the_way(options):
    found = run_on_ranks(trains_on, 2, options)
    assert found == [([[1.5, 1.5]], [0, 1], 0), ([[1.5, 1.5]], [0, 1], 1)]


def options_of_groups() -> list[bool]:
    """Whether each default group is made with the options that the process was given."""
    given, found, make = object(), [], registry.make_default_group

    def noted(**options: Any) -> None:
        found.append(options.get("pg_options") is given)
        make(**options)

    registry.make_default_group = noted
    PartialState(cpu=True, pg_options=given)
    registry.rebuild_groups("1")
    return found


def test_a_group_that_is_rebuilt_has_the_options_of_the_first() -> None:
    assert run_on_ranks(options_of_groups, 2) == [[True, True]] * 2


def counts_and_begins_again():
    """The calls of a group; then a rank whose group is gone makes one together with those that have theirs."""
    accelerator = Accelerator(cpu=True)
    before = registry.collectives()
    dist.all_reduce(torch.ones(1))
    calls = [registry.collectives()[name] - count for name, count in before.items()]
    if accelerator.process_index == 1:
        dist.destroy_process_group()
        assert registry.collectives() == {}
    registry.rebuild_groups("1")
    total = torch.ones(1)
    dist.all_reduce(total)
    return calls, total.item()


def test_collectives_are_counted_by_group_and_a_rank_without_one_takes_part():
    assert run_on_ranks(counts_and_begins_again) == [([1], 2.0)] * 2


def test_ranks_of_one_copy_have_the_same_samples() -> None:
    mesh = Mesh(dp_replicate=2, cp=2, tp=2)
    assert [mesh.data_replica(rank) for rank in range(8)] == [(0, 2)] * 4 + [(1, 2)] * 4
    assert mesh.ranks_along(5, "tp") == (4, 5)
    assert mesh.ranks_along(5, "dp_replicate") == (1, 5)
    assert mesh.ranks_along(5, "cp", "tp") == (4, 5, 6, 7)
    assert Mesh(dp_shard=4).data_replica(3) == (3, 4)
    # every rank has coordinates of its own
    for pp, dp_shard, tp in itertools.product((1, 2, 3), repeat=3):
        mesh = Mesh(pp=pp, dp_shard=dp_shard, tp=tp)
        found = [tuple(mesh.coordinates(rank).values()) for rank in range(mesh.size)]
        assert sorted(set(found)) == found


@pytest.mark.parametrize(
    ("mesh", "size", "message"),
    [
        (Mesh(dp_shard=2, tp=2), 8, "one of these fits: dp_shard=4; tp=4"),
        (Mesh(dp_shard=2, tp=3), 8, "one of these fits: tp=4"),
        (Mesh(dp_shard=3, tp=5), 8, "Launch 15 ranks"),
        (Mesh(), 8, "one of these fits: dp_replicate=8"),
    ],
    ids=str,
)
def test_degrees_that_do_not_fit_are_an_error_with_those_that_do(mesh: Mesh, size: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        mesh.checked(size)
    with pytest.raises(ConfigurationError, match=r"pp=-1, tp=0 was requested"):
        Mesh(tp=0, pp=-1)
