"""An Accelerator that is pickled comes back as itself in its process, and is refused in every other one."""

import copy
import multiprocessing
import pickle
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate_nb import Accelerator
from accelerate_nb.errors import PayloadError, StateError
from accelerate_nb.transport.payload import FunctionCall, pack
from accelerate_nb.utils import DataLoaderConfiguration
from tests.ranks import run_on_ranks


def test_in_its_process_it_is_itself() -> None:
    accelerator = Accelerator(cpu=True)
    held = pickle.loads(pickle.dumps({"accelerator": accelerator, "more": [accelerator]}))
    assert held["accelerator"] is accelerator
    assert held["more"] == [accelerator]
    assert copy.copy(accelerator) is accelerator


def pickled(_: Any = None) -> bytes:
    return pickle.dumps(Accelerator(cpu=True))


def pickled_twice() -> list[bytes]:
    accelerators = [Accelerator(cpu=True) for _ in range(2)]
    return [pickle.dumps(accelerator) for accelerator in accelerators * 2]


def test_what_is_pickled_is_the_same_each_time_and_on_each_rank() -> None:
    found, of_rank_1 = run_on_ranks(pickled_twice, 2)
    assert found[:2] == found[2:] == of_rank_1[:2]
    assert found[0] != found[1]


def test_elsewhere_the_error_names_where_it_belongs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate_nb.runtime.accelerator.accelerator._objects", WeakValueDictionary())
    ((from_a_worker,), late) = run_on_ranks(pickled, 1), pickled()
    with pytest.raises(StateError, match="belongs to the process in which it was made"):
        pickle.loads(from_a_worker)
    with pytest.raises(StateError, match="for as long as it is in use there"):
        pickle.loads(late)


def test_a_function_that_captures_one_is_not_launched() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(
        PayloadError, match=r"'accelerator', a .*Accelerator, .* by '<lambda>'.*Make 'accelerator' inside"
    ):
        pack(FunctionCall(lambda: accelerator.device, (), {}))
    spawned = multiprocessing.get_context("spawn").Process(target=print, args=(accelerator,))
    with pytest.raises(StateError, match="Make it inside the function that is launched"):
        spawned.start()


def state_of_a_run() -> tuple[bytes, str]:
    state = Accelerator(mixed_precision="bf16", strategy="ddp").state
    return pickle.dumps(state), repr(state)


def test_its_state_is_pickled_with_its_attributes() -> None:
    for pickled_state, text in [*run_on_ranks(state_of_a_run, 2), state_of_a_run()]:
        found = pickle.loads(pickled_state)
        assert (repr(found), found.mixed_precision, found.fsdp_plugin) == (text, "bf16", None)


@pytest.mark.parametrize("dispatched", [False, True])
def test_a_prepared_loader_is_pickled_and_copied_with_its_order_and_epoch(dispatched: bool) -> None:
    config = DataLoaderConfiguration(dispatch_batches=dispatched, use_seedable_sampler=True, data_seed=3)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(10)), batch_size=2, shuffle=True))
    next(iter(loader))
    twins = pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader)
    for twin in twins:
        assert type(twin) is type(loader)
        assert twin.iteration == loader.iteration == 1
    shallow = copy.copy(loader)
    twins += (shallow,)
    expected = [batch.tolist() for (batch,) in loader]
    assert shallow.iteration == 1  # each counts its own epochs
    for twin in twins:
        assert [batch.tolist() for (batch,) in twin] == expected
