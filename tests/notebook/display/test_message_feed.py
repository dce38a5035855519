"""What a page is told adds up to the run: everything once, then only what has changed, in messages of bounded size."""

import json
import math
from typing import Any

import pytest

from accelerate_nb.events.event_types import (
    DeviceSample,
    Display,
    Failure,
    Frame,
    HostSample,
    IdleWarning,
    LogLine,
    MeshCoordinates,
    Metric,
    NodeRanks,
    PrecisionChoice,
    Progress,
    Restart,
    StateChange,
    StepBreakdown,
)
from accelerate_nb.events.run_state import RunState
from accelerate_nb.notebook.display.message_feed import MessageFeed, failure_message
from accelerate_nb.reports.summary import RunFacts

FACTS = RunFacts(name="train", why="2 on the CPU", folder="/runs/1", started=5.0, size=2)


def line(text: str, rank: int = 0, *, open: bool = False, stream: Any = "stdout", time: float = 1.0) -> LogLine:
    return LogLine(rank=rank, stream=stream, text=text, time=time, open=open)


def applied(view: RunState, *events: Any) -> RunState:
    for event in events:
        view.apply(event)
    return view


def fed(size: int = 1, *events: Any) -> tuple[RunState, MessageFeed]:
    """A run, and a feed whose page knows everything of it so far."""
    view = applied(RunState(size), *events)
    feed = MessageFeed(view, clock=lambda: 9.0)
    for _ in feed.backlog(FACTS):
        pass
    return view, feed


def test_the_first_message_of_a_backlog_resets_the_page_and_holds_all_that_is_small():
    view = applied(
        RunState(2),
        StateChange(None, "running", 1.0, "go"),
        StateChange(1, "running", 1.0, "17"),
        Progress(1, "epoch", 3, None, 1.0, rate=2.0),
        DeviceSample(0, "cuda:0", 50.0, 5, 10, 1.0),
        HostSample(12.5, (1, 2), None, (3, 4), 1.0),
        IdleWarning(60.0, "rank 0 waits", 1.0),
    )
    (message,) = MessageFeed(view, clock=lambda: 9.0).backlog(FACTS)
    assert message["reset"] is True
    assert (message["seq"], message["now"]) == (1, 9.0)
    assert message["run"]["name"] == "train"
    assert message["state"] == {"state": "running", "detail": "go", "ended": None}
    assert message["ranks"] == [[0, "starting", "", 0], [1, "running", "process 17", 0]]
    assert message["progress"] == [[1, "epoch", 3, None, 2.0, "it", False, "epoch", ""]]
    assert message["devices"] == [[0, "cuda:0", 50.0, 5, 10]]
    assert message["host"] == [["cpu", 12.5, 100, "%"], ["memory", 1, 2, "B"], ["shared memory", 3, 4, "B"]]
    assert message["idle_warning"] == {"seconds": 60.0, "text": "rank 0 waits"}


def test_only_what_has_changed_is_sent_and_nothing_where_nothing_has():
    loss = Metric(0, "loss", 1.0, 1, 1.0)
    view, feed = fed(2, Progress(0, "a", 1, 9, 1.0), Progress(1, "a", 1, 9, 1.0), line("x"), loss)
    assert feed.news() is None
    applied(view, Progress(1, "a", 2, 9, 2.0))
    message = feed.news()
    assert feed.news() is None
    assert set(message) == {"seq", "now", "progress"}
    assert message["progress"] == [[1, "a", 2, 9, None, "it", False, "a", ""]]


def test_numbers_of_messages_go_up_by_one_over_backlogs_too():
    view = applied(RunState(1), *(line(str(number)) for number in range(5000)))
    feed = MessageFeed(view)
    numbers = [item["seq"] for item in feed.backlog(FACTS)]
    view.apply(line("more"))
    numbers += [(feed.news() or {})["seq"], *(item["seq"] for item in feed.backlog(FACTS))]
    assert numbers == list(range(1, len(numbers) + 1))


def test_a_backlog_holds_every_kept_line_in_messages_of_2000():
    view = applied(RunState(1, backlog=7000), *(line(str(number)) for number in range(10_000)))
    messages = [*MessageFeed(view).backlog(FACTS)]
    assert max(len(message["lines"]) for message in messages) == 2000
    assert [row[2] for message in messages for row in message["lines"]] == [*map(str, range(3000, 10_000))]
    assert sum(message["skipped"] for message in messages) == 3000
    assert [bool(message.get("reset")) for message in messages] == [True, False, False, False]


def test_a_flood_is_cut_to_its_newest_lines_and_the_rest_is_counted():
    view, feed = fed()
    applied(view, *(line(str(number)) for number in range(5000)))
    assert feed.is_far_behind()
    message = feed.news()
    assert len(message["lines"]) == 2000
    assert message["lines"][-1][2] == "4999"
    assert message["skipped"] == 3000
    assert message["line_count"] == 5000


def test_lines_of_megabytes_do_not_make_a_message_of_hundreds():
    view, feed = fed()
    applied(view, *(line("x" * 1_000_000) for _ in range(30)), *(line("y" * 15_000) for _ in range(200)))
    message = feed.news()
    assert len(json.dumps(message)) < 1_100_000
    assert message["skipped"] + len(message["lines"]) == 230
    assert message["lines"][0][2].startswith("yyy")


def test_a_line_that_is_too_long_is_cut_and_marked():
    (message,) = MessageFeed(applied(RunState(1), line("z" * 30_000))).backlog(FACTS)
    ((_, _, text, _, _),) = message["lines"]
    assert len(text) < 21_000
    assert text.endswith("zzz ... (10,000 more characters are in the run's folder)")


NODES = (NodeRanks(0, "a", 0, 0), NodeRanks(1, "b", 1, 1))


@pytest.mark.parametrize(
    ("events", "name", "sent"),
    [
        ([PrecisionChoice(0, "bf16", 1.0)], "precision", "bf16"),
        ([MeshCoordinates(1, {"pp": 0, "dp_shard": 1}, 1.0)], "coordinates", [[1, "pp 0 dp_shard 1"]]),
        (NODES, "nodes", [[0, "node 0 · a", 0, 0], [1, "node 1 · b", 1, 1]]),
        ([*NODES, HostSample(12.5, (1, 2), None, None, 1.0, node=1)], "loads", [[1, 12.5, 1, 2]]),
        ([HostSample(1.0, (1, 2), None, None, 1.0)], "host", [["cpu", 1.0, 100, "%"], ["memory", 1, 2, "B"]]),
        ([IdleWarning(5.0, "waits", 1.0)], "idle_warning", {"seconds": 5.0, "text": "waits"}),
    ],
)
def test_a_fact_is_sent_when_it_has_changed_once_and_to_a_page_that_begins_anew(events, name, sent):
    view, feed = fed(2)
    for event in events:
        view.apply(event)
        message = feed.news() or {}
    assert message[name] == sent
    for _ in range(2):
        view.apply(line("x"))
        assert name not in (feed.news() or {})
        (first,) = feed.backlog(FACTS)
        assert first[name] == sent


def test_a_precision_that_is_given_up_is_sent():
    view, feed = fed()
    for name in ("bf16", "no"):
        view.apply(PrecisionChoice(0, name, 1.0))
        assert (feed.news() or {})["precision"] == name


def test_the_parts_of_steps_are_sent_in_milliseconds_with_what_makes_them_slow():
    view, feed = fed()
    view.apply(StepBreakdown(0, 5, 0.006, 0.003, 0.001, 0.0, 0.0, 0.0, 1.0, workers=0))
    message = feed.news() or {}
    assert message["steps"] == [[0, [6.0, 3.0, 1.0, 0.0, 0.0, 0.0]]]
    (cause,) = message["causes"]
    assert cause == "waiting for the loader is 60 % of the step (num_workers=0): pass num_workers=4 to the DataLoader"
    view.apply(line("a line"))
    assert not {"steps", "causes"} & set(feed.news() or {})
    view.apply(StepBreakdown(0, 9, 0.0, 0.003, 0.001, 0.0, 0.0, 0.0, 2.0, workers=4))
    assert (feed.news() or {})["causes"] == []


def test_an_open_line_is_sent_when_it_changes_and_again_after_a_line_has_ended():
    view, feed = fed()
    view.apply(line("10 %", open=True))
    assert (feed.news() or {})["lines"] == [[0, 0, "10 %", 1.0, 1]]
    view.apply(Metric(0, "loss", 1.0, 1, 1.0))
    assert "lines" not in (feed.news() or {})
    applied(view, line("100 %"), line("next", open=True))
    assert (feed.news() or {})["lines"] == [[0, 0, "100 %", 1.0, 0], [0, 0, "next", 1.0, 1]]
    # a rank that starts anew has left its line behind
    view.apply(StateChange(0, "starting", 2.0))
    assert (feed.news() or {})["lines"] == [[0, 0, "", 1.0, 1]]


def test_a_bar_that_a_rank_draws_is_sent_as_a_bar_and_not_as_a_line_that_is_open():
    drawn = "epoch 1:  40%|####      | 4/10 [00:01<00:02,  3.1it/s]"
    view = applied(RunState(1), line("before"), line(drawn, open=True, stream="stderr"))
    feed = MessageFeed(view)
    assert [row[2] for message in feed.backlog(FACTS) for row in message.get("lines", [])] == ["before", drawn]
    view.apply(Progress(0, "epoch 1", 5, 10, 2.0))
    view.apply(line(drawn.replace("4/10", "5/10"), open=True, stream="stderr"))
    message = feed.news() or {}
    # what the page took for a line before it knew of the bar is taken back
    assert [row[2] for row in message["lines"]] == [""]
    assert message["progress"][0][1:4] == ["epoch 1", 5, 10]
    view.apply(line(drawn.replace("4/10", "10/10"), stream="stderr"))
    assert [row[2] for row in (feed.news() or {})["lines"]] == [drawn.replace("4/10", "10/10")]


def test_a_backlog_ends_with_the_open_lines():
    view = applied(RunState(1), line("a"), line("50 %", open=True, stream="stderr"))
    *_, last = MessageFeed(view).backlog(FACTS)
    assert last["lines"] == [[0, 1, "50 %", 1.0, 1]]


def test_numbers_that_json_does_not_know_are_sent_as_words():
    view, feed = fed()
    applied(view, *(Metric(0, "loss", value, 1, 1.0) for value in (math.nan, math.inf, -math.inf, 0.5)))
    message = feed.news()
    assert message["metrics"] == [["loss", 0, [[1, "nan", 1.0], [1, "inf", 1.0], [1, "-inf", 1.0], [1, 0.5, 1.0]]]]
    json.dumps(message, allow_nan=False)


def test_many_points_are_thinned_and_the_newest_stays():
    view, feed = fed()
    applied(view, *(Metric(0, "loss", float(step), step, 1.0) for step in range(12_000)))
    (name, rank, points), *_ = (feed.news() or {})["metrics"]
    assert (name, rank) == ("loss", 0)
    assert 1000 < len(points) <= 5001
    assert points[-1][0] == 11_999
    ((_, _, again), *_) = next(MessageFeed(view).backlog(FACTS))["metrics"]
    assert again[-1][0] == 11_999


def test_a_display_that_is_only_text_is_lines():
    view, feed = fed()
    view.apply(Display(0, {"text/plain": "a\nb"}, {}, 1.0))
    assert [row[2] for row in (feed.news() or {})["lines"]] == ["a", "b"]


FAILED = Failure(1, "KeyError", "'x'", "Traceback ...", 2.0, frames=(Frame("Cell In[1], line 2", "f", "x['x']", True),))


def test_the_failure_that_led_to_the_others_is_sent_and_the_others_in_a_line():
    lost = Failure(0, "RuntimeError", "closed by peer\nmore", "", 1.0, lost_connection=True, last_lines=("bye",))
    message = failure_message([lost, FAILED])
    assert (message["rank"], message["type"]) == (1, "KeyError")
    assert message["frames"] == [["Cell In[1], line 2", "f", "x['x']", True]]
    assert message["others"] == ["rank 0 lost its connection"]
    json.dumps(message)
    died = Failure(0, "SIGKILL", "it was killed", "", 1.0, exit_code=-9, last_lines=("last",))
    message = failure_message([died])
    assert (message["frames"], message["last_lines"]) == ([], ["last"])


def test_a_failure_is_sent_once_and_taken_back_where_the_rank_starts_anew():
    view, feed = fed(2)
    view.apply(FAILED)
    assert (feed.news() or {})["failure"]["type"] == "KeyError"
    view.apply(line("x"))
    assert "failure" not in (feed.news() or {})
    view.apply(StateChange(1, "starting", 3.0))
    assert (feed.news() or {})["failure"] is None


def test_a_restart_is_sent_with_the_former_ones_and_bars_are_sent_anew():
    view, feed = fed(2, Progress(1, "epoch", 3, None, 1.0))
    applied(view, Restart(1, 2, "rank 1 ended with SIGKILL", 0.0, 2.0), Progress(1, "epoch", 1, None, 2.0))
    message = feed.news()
    assert message["restarts"] == [[1, 2, "restart 1 of 2: rank 1 ended with SIGKILL"]]
    assert [bar[:3] for bar in message["progress"]] == [[1, "epoch", 1]]
    applied(view, Restart(2, 2, "rank 0 stopped with KeyError", 0.0, 3.0))
    assert [item[0] for item in feed.news()["restarts"]] == [1, 2]
    (first,) = feed.backlog(FACTS)
    assert len(first["restarts"]) == 2


def test_ranks_that_were_stopped_have_not_failed():
    view = applied(RunState(1), StateChange(None, "stopped", 3.0), Failure(0, "KeyboardInterrupt", "", "", 2.0))
    assert "failure" not in next(MessageFeed(view).backlog(FACTS))
