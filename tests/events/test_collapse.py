"""Equal output of ranks is folded into one: nothing is lost, nothing comes twice, nothing waits for long."""

import random
from collections import defaultdict

import pytest

from accelerate_nb.events.collapse import WINDOW, OutputCollapser, folded
from accelerate_nb.events.event_types import Display, LogLine


def line(rank, text, stream="stdout", time=0.0, open=False):
    return LogLine(rank, stream, text, time, open)


def rich(rank, html, text="x"):
    return Display(rank, {"text/html": html, "text/plain": text}, {}, 0.0)


def result(rank, text):
    return Display(rank, {"text/plain": text}, {}, 0.0)


def shown(emitted):
    return [(item.ranks, item.item.text) for item in emitted]


def test_what_all_ranks_write_comes_once_and_at_once():
    folding = OutputCollapser(range(4))
    folding.take([line(rank, "hello") for rank in range(4)], now=0.0)
    assert shown(folding.ready(now=0.0)) == [((0, 1, 2, 3), "hello")]


@pytest.mark.parametrize(
    ("at_once", "later", "emitted"),
    [
        # of what came together the lowest rank's lines come first
        ("1 b, 0 a", "1 d, 0 c", "0 a, 1 b, 0 c, 1 d"),
        # equal lines are found behind lines that differ
        ("0 epoch, 1 own, 1 epoch, 0 other, 0 done", "1 done", "1 own, 01 epoch, 0 other, 01 done"),
        # some ranks that agree are named together
        ("0 even, 1 odd, 2 even, 3 odd", "", "02 even, 13 odd"),
        # lines of one rank in a row stay together
        ("0 a, 0 b, 1 c, 1 d", "", "0 a, 0 b, 1 c, 1 d"),
    ],
)
def test_equal_lines_come_once_and_others_by_rank_in_their_order(at_once, later, emitted):
    folding = OutputCollapser({int(item[0]) for item in at_once.split(", ")})
    for now, text in ((0.0, at_once), (0.1, later)):
        folding.take([line(int(item[0]), item[2:]) for item in text.split(", ") if item], now)
    assert ", ".join(f"{''.join(map(str, ranks))} {text}" for ranks, text in shown(folding.rest())) == emitted


def test_what_only_the_first_rank_writes_does_not_part_the_others_lines():
    folding = OutputCollapser(range(3))
    folding.take([line(rank, "epoch") for rank in (1, 2)], 0.0)
    folding.take([line(0, "saving"), line(0, "epoch")], 0.1)
    assert shown(folding.ready(WINDOW)) == [((0,), "saving"), ((0, 1, 2), "epoch")]


def test_a_rank_alone_waits_for_the_window_only():
    folding = OutputCollapser(range(2))
    folding.take([line(0, "a")], now=10.0)
    assert shown(folding.ready(now=10.0 + WINDOW / 2)) == []
    assert shown(folding.ready(now=10.0 + WINDOW)) == [((0,), "a")]
    folding.take([line(1, "a")], now=11.0)
    assert shown(folding.ready(now=11.0 + WINDOW)) == [((1,), "a")]


def test_the_streams_stay_apart_and_one_read_of_both_pipes_has_one_order():
    folding = OutputCollapser(range(2))
    folding.take([line(0, "a"), line(1, "a", "stderr")], 0.0)
    assert [(item.ranks, item.item.stream) for item in folding.rest()] == [((0,), "stdout"), ((1,), "stderr")]
    folding = OutputCollapser(range(2))
    folding.take([line(0, "out", time=1.0), line(0, "error", "stderr", time=1.001)], 0.0)
    folding.take([line(1, "error", "stderr", time=1.0), line(1, "out", time=1.001)], 0.0)
    assert shown(folding.ready(0.0)) == [((0, 1), "out"), ((0, 1), "error")]


def test_what_came_later_on_standard_output_stays_later():
    folding = OutputCollapser([0])
    folding.take([line(0, "error", "stderr", time=1.0), line(0, "out", time=2.0)], 0.0)
    assert [text for _, text in shown(folding.rest())] == ["error", "out"]


def test_crossed_lines_are_all_there():
    folding = OutputCollapser(range(2))
    folding.take([line(0, "a"), line(0, "b"), line(1, "b"), line(1, "a")], 0.0)
    emitted = shown(folding.rest())
    assert per_rank(emitted) == {0: ["a", "b"], 1: ["b", "a"]}
    assert len(emitted) == 3


def per_rank(emitted):
    found = defaultdict(list)
    for ranks, text in emitted:
        for rank in ranks:
            found[rank].append(text)
    return dict(found)


@pytest.mark.parametrize("seed", range(30))
def test_whatever_ranks_write_each_keeps_its_order_and_all_its_lines(seed):
    chance = random.Random(seed)
    size = chance.randint(1, 5)
    written = {rank: [chance.choice("abcdef ") for _ in range(chance.randint(0, 60))] for rank in range(size)}
    left = {rank: list(texts) for rank, texts in written.items()}
    folding, emitted, now = OutputCollapser(range(size)), [], 0.0
    while any(left.values()):
        rank = chance.choice([rank for rank, texts in left.items() if texts])
        folding.take([line(rank, left[rank].pop(0), time=now)], now)
        now += chance.random() * 0.1
        emitted += shown(folding.ready(now))
    emitted += shown(folding.rest())
    assert per_rank(emitted) == {rank: texts for rank, texts in written.items() if texts}
    assert shown(folding.rest()) == []


def test_equal_results_and_equal_displays_are_folded():
    folding = OutputCollapser(range(2))
    folding.take([result(0, "3"), result(1, "3"), rich(0, "<b>"), rich(1, "<b>"), rich(0, "<i>"), rich(1, "<u>")], 0.0)
    assert [item.ranks for item in folding.rest()] == [(0, 1), (0, 1), (0,), (1,)]


def test_a_rank_that_was_not_expected_is_taken_too():
    folding = OutputCollapser([0])
    folding.take([line(3, "from before")], 0.0)
    assert shown(folding.rest()) == [((3,), "from before")]
    folding.take([line(0, "now")], 1.0)
    assert shown(folding.ready(1.0)) == [((0,), "now")]


def test_bars_that_stand_side_by_side_are_folded():
    bars = [line(0, "50%", open=True), line(1, "40%", open=True), line(2, "50%", open=True)]
    assert shown(folded(bars)) == [((0, 2), "50%"), ((1,), "40%")]
