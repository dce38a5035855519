"""The ranks that tests run on tell what happened to them."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RanksFailed, run_on_ranks


def one_raises() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise KeyError("lost")
    dist.all_reduce(torch.ones(1))


def one_dies() -> None:
    if os.environ["RANK"] == "1":
        os._exit(7)


def one_hangs() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    else:
        time.sleep(600)


def test_a_rank_that_raises_is_quoted() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)one_raises on 2 ranks.*rank 1: Traceback.*KeyError: 'lost'"):
        run_on_ranks(one_raises, 2)


def test_a_rank_that_dies_is_reported() -> None:
    with pytest.raises(RanksFailed, match="rank 1: died without a word, exit code 7"):
        run_on_ranks(one_dies, 2)


def test_a_rank_that_hangs_shows_where() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)rank 0: did not answer.*all_reduce.*rank 1: did not.*one_hangs"):
        run_on_ranks(one_hangs, 2, limit=4)
