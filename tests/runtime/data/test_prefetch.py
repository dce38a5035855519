"""The next batch is on its way to the device before the present one is handed out."""

import gc
import random
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate_nb.runtime.data.prepare import prepare_data_loader
from accelerate_nb.runtime.data.shard import BackgroundCopier, movable_ahead, one_copy_ahead
from tests.runtime.data.loaders import Numbers, Stream, plain


class Written:
    """A copier that writes down what is asked of it."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def begin(self, batch: Any) -> Any:
        self.log.append(f"begin {batch}")
        return batch

    def finish(self, begun: Any) -> Any:
        self.log.append(f"finish {begun}")
        return begun

    def end(self) -> None:
        self.log.append("end")


def read(log: list[str], count: int) -> Iterator[tuple[int, bool]]:
    for number in range(count):
        log.append(f"read {number}")
        yield number, number == count - 1


def test_a_copy_is_begun_before_the_batch_before_it_is_handed_out() -> None:
    copier = Written()
    seen = []
    for number, is_last in one_copy_ahead(read(copier.log, 3), copier):
        copier.log.append(f"compute {number}")
        seen.append((number, is_last))
    assert seen == [(0, False), (1, False), (2, True)]
    assert copier.log == [
        *("read 0", "begin 0", "read 1", "begin 1", "finish 0", "compute 0"),
        *("read 2", "begin 2", "finish 1", "compute 1", "finish 2", "compute 2", "end"),
    ]

    for count in (0, 1):
        assert list(one_copy_ahead(read([], count), Written())) == [(0, True)][:count]


def test_only_what_is_known_is_copied_ahead_and_only_where_something_can_overlap() -> None:
    assert movable_ahead({"a": [torch.ones(1), None], "b": ["x"], "c": 3})
    for unknown in (object(), torch.ones(2, 2).to_sparse()):
        assert not movable_ahead([torch.ones(1), unknown])
    for device, non_blocking in (("cpu", True), ("cuda", False)):
        loader: Any = prepare_data_loader(DataLoader(Numbers(1)), non_blocking=non_blocking)
        assert loader._copier(device) is None


@pytest.mark.parametrize("data", [Numbers(7), Stream(7)])
def test_a_loader_that_copies_ahead_reports_the_same(data: Any) -> None:
    copier, cpu = Written(), torch.device("cpu")
    loader: Any = prepare_data_loader(DataLoader(data, 2), cpu, 1, 0, put_on_device=True, dispatch_batches=False)
    loader._copier = lambda device: copier
    seen = [(plain(batch), loader.end_of_dataloader, loader.position()["batches"]) for batch in loader]
    assert seen == [([0, 1], False, 1), ([2, 3], False, 2), ([4, 5], False, 3), ([6], True, 0)]
    assert len(copier.log) == 9


def names_of_threads() -> list[str]:
    return [item.name for item in threading.enumerate() if item.name.startswith("accelerate-nb batches")]


def batch_and_thread(batch: Any) -> tuple[Any, str]:
    """In place of what sends a batch: the thread that did."""
    return batch, threading.current_thread().name


def test_batches_are_sent_by_a_thread_that_ends_with_the_epoch_or_the_loop_and_unknown_ones_by_the_loop() -> None:
    sent = list(one_copy_ahead(read([], 3), BackgroundCopier(batch_and_thread)))
    assert sent == [((number, "accelerate-nb batches"), number == 2) for number in range(3)]
    assert names_of_threads() == []
    for is_left in (True, False):
        knot: list[Any] = [one_copy_ahead(read([], 3), BackgroundCopier(batch_and_thread))]
        knot.append(knot)
        next(knot[0])
        assert len(names_of_threads()) == 1
        if is_left:
            knot[0].close()
            assert names_of_threads() == []
        del knot
        gc.collect()
        assert names_of_threads() == []
    (((_, thread), _),) = one_copy_ahead([(object(), True)], BackgroundCopier(batch_and_thread))
    assert thread == threading.current_thread().name


def breaks_at(number: int) -> Iterator[tuple[int, bool]]:
    yield from ((item, False) for item in range(number))
    raise KeyError("this batch is broken")


def refuses(batch: Any) -> Any:
    raise MemoryError("the device is full")


def test_an_error_of_the_next_batch_is_raised_when_its_turn_comes_and_one_of_the_sending_in_the_loop() -> None:
    seen = []
    with pytest.raises(KeyError, match="is broken") as caught:
        for (batch, _), _ in one_copy_ahead(breaks_at(2), BackgroundCopier(batch_and_thread)):
            seen.append(batch)
    assert seen == [0, 1]
    assert "breaks_at" in "".join(traceback.format_tb(caught.tb))
    with pytest.raises(MemoryError, match="the device is full") as refused:
        list(one_copy_ahead(read([], 3), BackgroundCopier(refuses)))
    assert "refuses" in "".join(traceback.format_tb(refused.tb))
    assert names_of_threads() == []


class Drawn(torch.utils.data.Dataset[Any]):
    """Every sample is a number that is drawn when it is read."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return random.random()


def sending(data: Any, options: Any = None, **settings: Any) -> Any:
    """A loader whose batches are to be brought elsewhere."""
    loader = DataLoader(data, 1, **settings)
    loader = prepare_data_loader(loader, torch.device("meta"), 1, 0, put_on_device=True, **(options or {}))
    loader.send = batch_and_thread
    return loader


def test_what_is_read_in_this_process_draws_after_what_the_loop_drew_before() -> None:
    random.seed(1)
    expected = [random.random() for _ in range(8)]
    random.seed(1)
    seen = [number for batch, _ in sending(Drawn()) for number in (batch.item(), random.random())]
    assert seen == expected


def test_what_workers_read_is_sent_ahead_and_reported_at_its_turn() -> None:
    loader = sending(Numbers(3), num_workers=1)
    seen = [(plain(batch), thread, loader.end_of_dataloader, loader.position()["batches"]) for batch, thread in loader]
    assert [(batch, *rest) for batch, _, *rest in seen] == [([0], False, 1), ([1], False, 2), ([2], True, 0)]
    assert {thread for _, thread, *_ in seen} == {"accelerate-nb batches"}
    assert names_of_threads() == []


def test_a_loader_that_torchdata_reads_is_not_read_ahead() -> None:
    pytest.importorskip("torchdata")
    loader = sending(Numbers(4), {"use_stateful_dataloader": True}, num_workers=1)
    reader = iter(loader)
    next(reader)
    state = loader.state_dict()
    reader.close()
    loader.load_state_dict(state)
    assert [plain(batch) for batch, _ in loader] == [[1], [2], [3]]
