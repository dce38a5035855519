"""RunView adds up what happened: bounded, in order, and readable while it grows."""

import itertools
import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from accelerate_nb.events.event_types import (
    DeviceSample,
    Display,
    Failure,
    FirstStep,
    HostSample,
    LogLine,
    Metric,
    NodeRanks,
    Progress,
    Restart,
    StateChange,
)
from accelerate_nb.events.run_state import RunState


def line(text, rank=0, stream="stdout", open=False):
    return LogLine(rank, stream, text, 0.0, open)


def texts(lines):
    return [line.text for line in lines]


def fed(*events, **bounds):
    view = RunState(**bounds)
    for event in events:
        view.apply(event)
    return view


def test_lines_of_all_ranks_come_in_the_order_in_which_they_were_written_once_for_a_cursor():
    view = fed(line("a", 1), line("b", 0))
    cursor, changes = view.since(0).cursor, view.changes
    assert (view.since(cursor).items, view.changes) == ((), changes)
    view.apply(line("c", 1))
    assert texts(view.since(cursor).items) == ["c"]
    assert texts(view.since(0).items) == ["a", "b", "c"]
    assert texts(view.tail(1, 10)) == ["a", "c"]


def test_nodes_stand_in_their_order_once_each():
    first, second = NodeRanks(0, "a", 0, 1), NodeRanks(1, "b", 2, 3)
    assert fed().nodes == ()
    assert fed(second, first, second).nodes == (first, second)


def test_the_load_of_a_node_is_not_that_of_the_machine_which_launched():
    here, there = HostSample(1.0, (1, 2), None, None, 1.0), HostSample(2.0, (3, 4), None, None, 1.0, node=1)
    view = fed(NodeRanks(1, "b", 2, 3), here, there, HostSample(9.0, (1, 2), None, None, 1.0, node=7))
    assert view.host is here
    # a node that is none of the run has no load
    assert view.node_loads == {1: there}


def test_what_is_kept_no_longer_is_counted():
    view = fed(*(line(str(i), i % 2) for i in range(100)), backlog=10, tail=3)
    news = view.since(20)
    assert news.skipped == 70
    assert texts(news.items) == [str(i) for i in range(90, 100)]
    assert texts(view.tail(1, 5)) == ["95", "97", "99"]
    assert view.line_count == 100
    assert view.line_count_of(0) == 50


@pytest.mark.parametrize(
    "item",
    [
        line("x" * 1_000_000),
        Display(0, {"image/png": "x" * 1_000_000}, {}, 0.0),
        # with a text that is no UTF-8
        Display(0, {"application/json": {"rows": ["x" * 1_000_000, "\ud800"]}}, {}, 0.0),
    ],
)
def test_very_long_lines_and_displays_are_not_all_kept(item):
    view = fed(*([item] * 100))
    assert len(view.since(0).items) <= 32
    assert view.since(0).skipped >= 68
    assert len(view.rank(0).lines) <= 4


def test_the_newest_line_is_kept_however_long():
    view = fed(line("before"), line("x" * 50_000_000))
    assert [len(text) for text in texts(view.since(0).items)] == [50_000_000]
    assert view.since(0).skipped == 1


def test_an_open_line_is_replaced_by_the_next_and_ends_with_a_whole_one():
    view = fed(line("10%", open=True), line("20%", open=True))
    assert texts(view.open_lines()) == ["20%"]
    assert view.since(0).items == ()
    # there is something to draw
    assert view.changes == 2
    view.apply(line("100%"))
    assert view.open_lines() == ()
    assert texts(view.since(0).items) == ["100%"]


def test_each_stream_of_each_rank_has_its_own_open_line():
    view = fed(line("b", 1, open=True), line("a", open=True), line("c", 1, "stderr", open=True), line("d", 1))
    assert texts(view.open_lines()) == ["a", "c"]


def test_displays_stand_between_the_lines():
    shown = Display(0, {"text/html": "<b>x</b>"}, {}, 0.0)
    view = fed(line("a"), shown, line("b"))
    assert view.since(0).items[1] is shown
    assert view.line_count == 2


def test_a_run_and_its_ranks_have_states():
    view = fed(StateChange(None, "running", 0.0, "2 workers"), StateChange(1, "running", 0.0), size=3)
    assert (view.state, view.detail) == ("running", "2 workers")
    assert [view.rank(rank).state for rank in view.ranks] == ["starting", "running", "starting"]


def test_the_newest_metric_and_its_course_are_kept():
    view = fed(*(Metric(0, "loss", float(i), i, 0.0) for i in range(10)))
    assert view.rank(0).metrics["loss"].value == 9.0
    assert [metric.value for metric in view.rank(0).series["loss"]] == [float(i) for i in range(10)]


@pytest.mark.parametrize("count", [1, 99, 100, 101, 1234, 10_000])
def test_a_long_course_is_thinned_evenly_from_its_beginning_to_its_end(count):
    view = fed(*(Metric(0, "loss", float(i), i, 0.0) for i in range(count)), points=100)
    steps = [metric.step for metric in view.rank(0).series["loss"]]
    assert steps[0] == 0
    assert steps[-1] == count - 1
    assert min(count, 50) <= len(steps) <= 101
    gaps = {after - before for before, after in itertools.pairwise(steps[:-1])}
    assert len(gaps) <= 1


def test_the_lowest_and_the_highest_value_of_a_long_course_stay_and_values_without_a_step_are_counted():
    values = [1.0] * 5000
    values[3001], values[4003], values[4505] = 0.01, 7.0, math.nan
    view = fed(*(Metric(0, "loss", value, None, 0.0) for value in values), points=100)
    series = view.rank(0).series["loss"]
    found = {metric.value: metric.step for metric in series}
    assert (found[0.01], found[7.0], series[-1].step) == (3001, 4003, 4999)
    steps = [metric.step for metric in series]
    assert 4505 in steps
    assert steps == sorted({*steps})
    assert [metric.step for metric in view.metrics_since(0).items[-2:]] == [4998, 4999]


def test_progress_and_devices_show_their_newest():
    bars = (Progress(0, "epoch", done, 3, 0.0) for done in (1, 2))
    view = fed(*bars, *(DeviceSample(0, "cuda:0", busy, 1, 2, 0.0) for busy in (10.0, 90.0)))
    assert view.rank(0).progress["epoch"].done == 2
    assert view.rank(0).devices["cuda:0"].utilisation == 90.0


def test_a_bar_that_changes_its_label_is_still_one_bar():
    view = fed(Progress(0, "epoch 1", 3, 3, 0.0, bar="outer"), Progress(0, "epoch 2", 1, 3, 0.0, bar="outer"))
    assert [bar.label for bar in view.rank(0).progress.values()] == ["epoch 2"]


def test_nested_bars_keep_their_order_whichever_moved_last():
    view = fed(Progress(0, "outer", 0, 3, 0.0), Progress(0, "inner", 0, 3, 0.0), Progress(0, "outer", 1, 3, 0.0))
    assert list(view.rank(0).progress) == ["outer", "inner"]
    view.apply(Progress(0, "inner", 3, 3, 0.0, closed=True))
    view.apply(Progress(0, "outer", 3, 3, 0.0, closed=True))
    assert list(view.rank(0).progress) == ["inner", "outer"]
    view.apply(Progress(0, "inner", 0, 3, 0.0))
    assert list(view.rank(0).progress) == ["outer", "inner"]


def test_a_bar_that_moves_is_kept_however_many_others_have_ended():
    ended = [Progress(0, f"epoch {number}", 3, 3, 0.0, closed=True) for number in range(50)]
    view = fed(Progress(0, "all", 0, 50, 0.0), *ended)
    assert len(view.rank(0).progress) == 20
    assert {"all", "epoch 49"} <= set(view.rank(0).progress)


def test_failures_come_in_the_order_of_ranks():
    view = fed(Failure(2, "KeyError", "x", "", 0.0), Failure(0, "ValueError", "y", "", 1.0), size=4)
    assert [failure.rank for failure in view.failures] == [0, 2]
    assert view.rank(2).failure.type == "KeyError"


def test_a_rank_that_starts_anew_has_not_failed():
    view = fed(line("57%", open=True), Failure(0, "KeyError", "x", "", 0.0), StateChange(0, "starting", 1.0))
    assert view.failures == ()
    assert view.open_lines() == ()


def test_a_restart_begins_an_attempt_without_steps_and_without_the_bars_of_the_former():
    view = fed(FirstStep(0, 1.0), Progress(0, "epoch", 1, 3, 1.0), size=2)
    assert view.has_stepped
    restart = Restart(1, 3, "rank 1 ended with SIGKILL", 0.1, 2.0)
    view.apply(restart)
    assert (view.restarts, view.has_stepped, view.rank(0).progress) == ((restart,), False, {})
    for attempt in range(2, 500):
        view.apply(Restart(attempt, 500, "", 0.0, 3.0))
    assert [item.attempt for item in view.restarts][::99] == [400, 499]


def test_a_restart_may_have_fewer_ranks_or_more():
    view = fed(size=2)
    for attempt, ranks in enumerate((3, 1, 2), 1):
        view.apply(Restart(attempt, 3, "", 0.0, 3.0, ranks))
        assert view.ranks == tuple(range(ranks))


def test_a_rank_that_has_not_written_yet_can_be_read():
    view = RunState()
    assert view.rank(5).lines == ()
    assert view.tail(5, 3) == ()
    assert view.line_count_of(5) == 0
    assert view.ranks == ()


@pytest.fixture
def _threads_alternate():
    """Threads take turns at nearly every instruction, so that what is not locked shows."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_threads_alternate")
def test_readers_lose_and_repeat_nothing_while_writers_write():
    view = RunState(backlog=100_000)

    def write(rank):
        for i in range(5000):
            view.apply(line(str(i), rank))

    seen, cursor = [], 0
    with ThreadPoolExecutor(4) as pool:
        pool.map(write, range(4))
        while len(seen) < 20_000:
            news = view.since(cursor)
            assert news.skipped == 0
            seen.extend(news.items)
            cursor = news.cursor
            view.rank(0)
            view.open_lines()
    for rank in range(4):
        assert [item.text for item in seen if item.rank == rank] == [str(i) for i in range(5000)]


def test_a_hundred_thousand_lines_are_taken_in_at_once():
    lines = [line(f"step {i} loss 0.1234", i % 4) for i in range(100_000)]
    view = RunState(size=4)
    taken = []
    for _ in range(3):
        begin = time.thread_time()
        for item in lines:
            view.apply(item)
        taken.append(time.thread_time() - begin)
    assert min(taken) < 0.5, f"{min(taken):.2f} s for 100,000 lines"


def test_a_slice_has_what_some_ranks_do_from_a_cursor_on_until_it_ends():
    sample = HostSample(1.0, (1, 2), None, None, 1.0)
    view = fed(line("before"), sample, size=2)
    cursor = view.since(0).cursor
    view.apply_lines([line("between"), line("of another", 1)])
    part = view.slice([0], cursor)
    view.apply_lines([line("within"), line("of another", 1)])
    for rank in (0, 1):
        view.apply(Metric(rank, "loss", 1.0, 0, 0.0))
        view.apply(StateChange(rank, "failed", 0.0))
    assert texts(part.since(0).items) == ["between", "within"]
    assert [metric.rank for metric in part.metrics_since(0).items] == [0]
    # its states are the caller's
    assert (part.ranks, part.rank(0).state, part.host) == ((0, 1), "starting", sample)
    end = view.end_slice(part)
    view.apply(line("after"))
    assert part.line_count == 2
    assert texts(view.since(end).items) == ["after"]
