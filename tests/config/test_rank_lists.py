"""Ranks are written as people type and read them."""

import pytest

from accelerate_nb.config.rank_lists import listed, named, of_ranks, spans


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        ([], []),
        ([3], [(3, 3)]),
        ([0, 1, 2], [(0, 2)]),
        ([0, 2, 3, 7], [(0, 0), (2, 3), (7, 7)]),
        # the order is the caller's
        ([2, 1, 0], [(2, 2), (1, 1), (0, 0)]),
    ],
)
def test_ranks_that_follow_each_other_are_one_span(ranks, found):
    assert spans(ranks) == found


def test_one_rank_is_a_rank_and_several_are_ranks():
    assert of_ranks([4]) == "rank 4"
    assert of_ranks((0, 1, 3)) == "ranks 0-1,3"
    assert of_ranks({5}, listed) == "rank 5"
    assert of_ranks([0, 1, 3], listed) == "ranks 0, 1, 3"
    assert named(iter([0, 1])) == "0-1"
