"""What is gathered for metrics holds each sample once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate_nb import Accelerator
from tests.ranks import run_on_ranks


def gathered(length: int, batch: int, kind: str) -> list[Any]:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(torch.arange(length), batch_size=batch))
    found: list[Any] = []
    for numbers in loader:
        if kind == "tensors":
            first, second = accelerator.gather_for_metrics((numbers, {"twice": numbers * 2}))
            assert torch.equal(second["twice"], first * 2)
            found += first.tolist()
        elif kind == "objects":
            found += accelerator.gather_for_metrics([f"number {number}" for number in numbers.tolist()])
        else:
            found += [
                sorted(accelerator.gather_for_metrics(numbers[:1].sum() * 0 + accelerator.process_index).tolist())
            ]
    return found


@pytest.mark.parametrize("length", [1, 7, 8, 11, 16, 17])
def test_every_sample_is_there_once_and_in_order(length: int) -> None:
    for found in run_on_ranks(gathered, 2, length, 4, "tensors"):
        assert found == list(range(length))


def test_objects_are_joined_and_cut_like_tensors() -> None:
    for found in run_on_ranks(gathered, 2, 11, 4, "objects"):
        assert found == [f"number {number}" for number in range(11)]


def test_a_number_of_each_process_is_no_sample() -> None:
    for found in run_on_ranks(gathered, 2, 9, 4, "scalars"):
        assert found == [[0, 1]] * 2
