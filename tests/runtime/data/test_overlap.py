"""The next batch is on its way to the device before the present one is handed out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate_nb.runtime.data.loading import prepare_data_loader
from accelerate_nb.runtime.data.overlap import movable_ahead, one_copy_ahead, overlapping
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
        *("read 2", "begin 2", "finish 1", "compute 1", "finish 2", "compute 2"),
    ]


@pytest.mark.parametrize("count", [0, 1])
def test_few_batches_are_copied_too(count: int) -> None:
    assert list(one_copy_ahead(read([], count), Written())) == [(0, True)][:count]


def test_only_what_is_known_is_copied_ahead() -> None:
    assert movable_ahead({"a": [torch.ones(1), None], "b": ["x"], "c": 3})
    assert not movable_ahead([torch.ones(1), object()])
    assert not movable_ahead([torch.ones(2, 2).to_sparse()])


def test_nothing_is_copied_ahead_where_nothing_can_overlap() -> None:
    assert overlapping("cpu", True) is None
    assert overlapping("cuda", False) is None


@pytest.mark.parametrize("data", [Numbers(7), Stream(7)])
def test_a_loader_that_copies_ahead_says_the_same(monkeypatch: pytest.MonkeyPatch, data: Any) -> None:
    copier = Written()
    monkeypatch.setattr("accelerate_nb.runtime.data.shard.overlapping", lambda device, non_blocking: copier)
    loader = prepare_data_loader(
        DataLoader(data, 2), torch.device("cpu"), 1, 0, put_on_device=True, dispatch_batches=False
    )
    seen = [(plain(batch), loader.end_of_dataloader, loader.position()["batches"]) for batch in loader]
    assert seen == [([0, 1], False, 1), ([2, 3], False, 2), ([4, 5], False, 3), ([6], True, 0)]
    assert len(copier.log) == 8


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a copy on a side stream needs a CUDA device")
def test_batches_are_right_on_a_gpu() -> None:
    data = DataLoader(Numbers(4096, "nested"), 64, pin_memory=True)
    loader = prepare_data_loader(data, torch.device("cuda", 0), 1, 0, put_on_device=True, non_blocking=True)
    weight = torch.ones(2048, 2048, device="cuda")
    sums = []
    for batch in loader:
        weight = weight @ weight / 2048  # keeps the device busy while the next batch is copied
        sums.append(batch["pair"].number.sum() + batch["list"][0].sum())
    whole = torch.arange(4096).view(-1, 64)
    assert torch.stack(sums).tolist() == (whole.sum(1) + (whole.float() / 2).sum(1)).tolist()
