"""Each process is dealt what Hugging Face Accelerate deals it."""

from itertools import product
from typing import Any

import accelerate.data_loader as theirs
import pytest
from torch.utils.data import BatchSampler, SequentialSampler

import accelerate_nb.data_loader as ours
from accelerate_nb.errors import ConfigurationError
from tests.runtime.data.loaders import Sized

LENGTHS = [0, 1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 23, 24]


class Pairs(list[list[int]]):
    """Batches of at most two indices, as somebody wrote them."""

    batch_size, drop_last = 2, False


def shards(package: Any, make: Any, processes: int, **options: Any) -> list[tuple[int, list[Any]]]:
    found = [package.BatchSamplerShard(make(), processes, index, **options) for index in range(processes)]
    return [(len(shard), list(shard)) for shard in found]


@pytest.mark.parametrize(("processes", "split", "even", "drop"), list(product([1, 2, 3], *[[False, True]] * 3)))
def test_batches_are_dealt_out_as_accelerate_does(processes: int, split: bool, even: bool, drop: bool) -> None:
    for length, size in product(LENGTHS, [1, 2, 3, 4, 6]):
        if split and size % processes:
            continue

        def make(length: int = length, size: int = size) -> BatchSampler:
            return BatchSampler(SequentialSampler(range(length)), size, drop)

        options = {"split_batches": split, "even_batches": even}
        dealt = shards(ours, make, processes, **options)
        expected = shards(theirs, make, processes, **options)
        assert [batches for _, batches in dealt] == [batches for _, batches in expected], (length, size)
        assert all(count == len(batches) for count, batches in dealt), (
            "Accelerate counts a part that a process doesn't get"
        )


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("batches", [[[0], [1, 2], [3, 4, 5], [6], [7, 8]], [[0, 1]], [[0], [1, 2]], []])
def test_batches_of_unknown_size_are_dealt_out_whole(batches: list[list[int]], even: bool) -> None:
    for processes in (1, 2, 3):
        mine, their = (shards(item, lambda: batches, processes, even_batches=even) for item in (ours, theirs))
        assert mine == their


def test_a_short_batch_in_the_middle_is_dealt_out_too() -> None:
    found = shards(ours, lambda: Pairs([[0, 1], [2], [3, 4], [5, 6]]), 2, even_batches=False)
    assert [shard for _, shard in found] == [[[0, 1], [3, 4]], [[2], [5, 6]]]


def test_a_batch_that_cannot_be_cut_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"the batch size \(3\) needs to be a round multiple .* \(2\)"):
        ours.BatchSamplerShard(BatchSampler(range(4), 3, False), 2, 0, split_batches=True)
    with pytest.raises(ConfigurationError, match="doesn't say how large its batches are"):
        ours.BatchSamplerShard([[0]], 2, 0, split_batches=True)


@pytest.mark.parametrize(("processes", "split", "drop"), list(product([1, 2, 3], *[[False, True]] * 2)))
def test_streams_are_dealt_out_as_accelerate_does(processes: int, split: bool, drop: bool) -> None:
    for length, size in product(LENGTHS, [1, 2, 3, 4, 6]):
        if split and size % processes:
            continue
        for index in range(processes):
            options = (size, drop, processes, index, split)
            mine, their = (package.IterableDatasetShard(Sized(length), *options) for package in (ours, theirs))
            assert list(mine) == list(their), (length, size, index)
            assert len(mine) == len(list(mine))
            if not split:
                assert len(mine) == len(their)


def test_a_stream_of_whole_batches_is_dealt_out_in_turn() -> None:
    found = [list(ours.IterableDatasetShard(Sized(5), None, False, 2, index)) for index in range(2)]
    assert found == [[0, 2, 4], [1, 3, 0]]
