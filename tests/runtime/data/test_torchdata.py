"""A loader prepared with `use_stateful_dataloader` is torchdata's, and goes on where its state was taken."""

import copy
import importlib
import pickle
import sys
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate_nb import Accelerator
from accelerate_nb.data_loader import DataLoaderAdapter, DataLoaderShard, SkipDataLoader, prepare_data_loader
from accelerate_nb.errors import MissingExtraError, StateError
from accelerate_nb.utils import DataLoaderConfiguration
from tests.peers import Peer, under_both
from tests.ranks import ONE_OR_TWO, run_on_ranks
from tests.runtime.data.loaders import Numbers, Shuffled, Stream, plain

pytest.importorskip("torchdata", reason="these loaders are torchdata's")


class Counting(Stream):
    """A stream that keeps its own place."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.position = 0

    def __iter__(self) -> Any:
        while self.position < len(self.numbers):
            self.position += 1
            yield self.numbers[self.position - 1]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


KINDS = ["indices", "shuffled", "seedable", "stream", "shuffled stream", "dispatched", "dispatched indices"]


def prepared(kind: str, length: int = 24, workers: int = 0) -> Any:
    config = DataLoaderConfiguration(
        use_stateful_dataloader=True,
        use_seedable_sampler=kind == "seedable",
        dispatch_batches=kind.startswith("dispatched"),
    )
    data: Any = Numbers(length)
    if "stream" in kind or kind == "dispatched":
        data = Shuffled(length) if kind == "shuffled stream" else Stream(length)
    shuffle = True if kind in ("shuffled", "seedable") else None
    return Accelerator(dataloader_config=config).prepare(DataLoader(data, 2, shuffle=shuffle, num_workers=workers))


def goes_on(how: str, workers: int, kinds: list[str]) -> list[str]:
    """The kinds that do not go on where they were."""
    wrong = []
    for kind in kinds:
        torch.manual_seed(6)
        loader = prepared(kind, workers=workers)
        list(loader)  # the second epoch is saved
        straight, state = [], {}
        for number, batch in enumerate(loader):
            straight.append((plain(batch), loader.end_of_dataloader))
            if number == 1:
                state = loader.state_dict() if how == "state" else loader.position()
                state = pickle.loads(pickle.dumps(state))
                straight.clear()
        following = [plain(batch) for batch in loader]
        torch.manual_seed(99)
        again = prepared(kind, workers=workers)
        again.load_state_dict(state) if how == "state" else again.resume(state)
        resumed = [(plain(batch), again.end_of_dataloader) for batch in again]
        if resumed != straight or len(straight) == 0:
            wrong.append(f"{kind}: {resumed} instead of {straight}")
        if kind != "shuffled" and [plain(batch) for batch in again] != following:
            wrong.append(f"{kind}: the epoch after it")
    return wrong


@pytest.mark.parametrize("how", ["state", "position"])
@pytest.mark.parametrize("size", ONE_OR_TWO)
def test_a_stateful_loader_goes_on_where_its_state_was_taken_as_do_workers(how: str, size: int) -> None:
    assert run_on_ranks(goes_on, size, how, 0, KINDS) == [[]] * size
    assert run_on_ranks(goes_on, 1, "state", 1, ["seedable", "stream"]) == [[]]


def states(peer: Peer) -> list[Any]:
    """What the state says at each batch, and what a loader reads that takes it up."""
    config = peer.door("utils").DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = peer.Accelerator(dataloader_config=config)
    found: list[Any] = []
    for data in (Numbers(9), Stream(9), Counting(9)):
        loader = accelerator.prepare(DataLoader(data, 2))
        for _ in loader:
            state = copy.deepcopy(loader.state_dict())
            found.append([state.get(name) for name in ("_num_yielded", "_iterator_finished", "_sampler_iter_yielded")])
            found.append((state.get("_fetcher_state") or {}).get("dataset_iter_state"))
            found.append(state.get("dataset_state"))
        found.append(state["_iterator_finished"])
    return found


def test_a_state_is_accelerates() -> None:
    both = under_both(states, 1)
    assert both.ours == both.theirs


def test_a_stateful_loader_can_be_pickled_and_subclassed() -> None:
    class Mine(DataLoaderShard):
        pass

    stateful = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
    loader = DataLoaderShard(Numbers(6), batch_size=2, use_stateful_dataloader=True)
    assert [plain(batch) for batch in pickle.loads(pickle.dumps(loader))] == [[0, 1], [2, 3], [4, 5]]
    for made in (
        Mine(Numbers(6), batch_size=2, use_stateful_dataloader=True),
        DataLoaderAdapter(Numbers(6), use_stateful_dataloader=True),
        SkipDataLoader(Numbers(6), 1, use_stateful_dataloader=True),
    ):
        assert isinstance(made, stateful)
    assert not isinstance(DataLoaderShard(Numbers(6)), stateful)


def test_without_torchdata_there_is_no_state_and_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StateError, match="use_stateful_dataloader=True"):
        DataLoaderAdapter(Numbers(2)).state_dict()
    monkeypatch.delitem(sys.modules, "accelerate_nb.runtime.data.torchdata", raising=False)
    monkeypatch.setitem(sys.modules, "torchdata.stateful_dataloader", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'accelerate-nb\[torchdata\]'"):
        DataLoaderShard(Numbers(2), use_stateful_dataloader=True)


def test_a_state_of_an_epochs_last_batch_is_followed_by_the_next_epoch() -> None:
    def make() -> Any:
        loader = DataLoader(Numbers(6), 2, shuffle=True, generator=torch.Generator().manual_seed(1))
        return prepare_data_loader(loader, num_processes=2, process_index=0, use_stateful_dataloader=True)

    loader = make()
    for _ in loader:
        state = pickle.loads(pickle.dumps(loader.state_dict()))
    again = make()
    again.load_state_dict(state)
    assert [plain(batch) for batch in again] == [plain(batch) for batch in loader]
