"""What plain text says beside a run's lines: bars, metrics, what happened, a summary; each once, and seldom in a log."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from accelerate_nb.events import event_types
from accelerate_nb.events.run_state import RunState
from accelerate_nb.notebook.display.text import TextFrontEnd
from tests.notebook.paper import Paper
from tests.reports import stories

STARTED = 1000.0
DRAWN = "epoch 1:  40%|####      | 4/10 [00:01<00:02, 3.1it/s]"


class StatusPaper(Paper):
    """A front end on paper, with a clock that is moved by hand."""

    def __init__(self, size=2, redraws=True):
        super().__init__(redraws=redraws)
        self.now = 0.0
        self.view = RunState(size)
        for rank in range(size):
            self.view.apply(event_types.StateChange(rank, "running", STARTED))
        self.front_end = TextFrontEnd(lambda: self, "[$rank] ", clock=lambda: self.now)
        facts = {"folder": Path("/runs/1"), "name": "train", "why": "2 processes", "started": STARTED}
        self.run = SimpleNamespace(view=self.view, done=False, **facts)
        self.front_end.opened(self.run)

    def feed(self, *events, seconds=1.0):
        for event in events:
            self.view.apply(event)
        for _ in range(2):
            self.now += seconds / 2
            self.front_end.refresh()

    def end(self, state="finished", at=STARTED + 75):
        self.feed(event_types.StateChange(None, state, at))
        self.front_end.closed()
        return self.texts


def bar(rank=0, label="epoch 1", done=4.0, total=10.0, *, closed=False, name="tqdm 0"):
    return event_types.Progress(rank, label, done, total, 1.0, 2.0, "it", closed, bar=name)


def metric(value, rank=0, name="loss", step=7):
    return event_types.Metric(rank, name, value, step, 1.0)


def drawn(text, rank=0):
    return event_types.LogLine(rank, "stderr", text, 1.0, open=True)


# ----------------------------------------------------------------------------------------------------------------- a screen


def test_newest_metrics_stand_below_the_lines():
    paper = StatusPaper()
    paper.feed(metric(2.0), metric(3e-4, name="lr"), metric(0.5, rank=1))
    assert paper.open == ["[0] loss 2  lr 3.00e-4  step 7", "[1] loss 0.5  step 7"]
    paper.feed(metric(1.25, step=8), bar())
    assert paper.open[0] == "[0] epoch 1 █████░░░░░░░ 4/10 2 it/s 00:03  loss 1.25  lr 3.00e-4  step 8"
    assert paper.texts == []
    paper.end()
    assert paper.open == []


def test_a_profile_is_a_line_of_the_rank_that_has_it_first():
    paper = StatusPaper()
    operations = (event_types.ProfiledOperation("aten::mm", 20, 0.3, 0.6, "cpu"),)
    for rank in (1, 0):
        paper.feed(event_types.StepProfile(rank, 1, 10, 0.5, operations, "/runs/1/p.json.gz", STARTED))
    head = "rank 1, profile of 10 steps: 50 ms a step, costliest operations on the CPU"
    assert paper.texts == [f"... {head} · aten::mm 60% · trace: /runs/1/p.json.gz ..."]


NAMELESS = DRAWN.removeprefix("epoch 1: ")


@pytest.mark.parametrize(
    ("events", "shown"),
    [
        ([bar(), drawn(DRAWN), bar(1), drawn(DRAWN, rank=1)], [f"[0] {DRAWN}", f"[1] {DRAWN}"]),
        ([bar(label="progress"), drawn(NAMELESS), metric(2.0)], [f"[0] {NAMELESS}", "[0] loss 2  step 7"]),
        ([bar(name="")], ["[0] epoch 1 █████░░░░░░░ 4/10 2 it/s 00:03"]),
        ([bar(name=""), bar(name="", done=10, closed=True)], []),
        (
            [bar(label="outer", name="tqdm 1"), bar(), drawn(DRAWN)],
            [f"[0] {DRAWN}", "[0] outer █████░░░░░░░ 4/10 2 it/s 00:03"],
        ),
    ],
    ids=["drawn as text", "without a name", "drawn by nobody", "ended", "above one that is drawn"],
)
def test_a_bar_is_shown_once(events, shown):
    paper = StatusPaper()
    for event in events:
        paper.feed(event)
    assert paper.open == shown


def test_many_ranks_are_reported_in_one_line():
    paper = StatusPaper(size=64)
    paper.feed(*(event for rank in range(64) for event in (metric(rank, rank), bar(rank, done=5 if rank == 3 else 6))))
    (row,) = paper.open
    assert row == "ranks 0–63: epoch 1 ██████░░░░░░ 5/10 2 it/s 00:02 (the slowest of 64)  loss 31.5 mean of 64  step 7"


def test_many_ranks_of_several_nodes_are_reported_in_a_line_a_node():
    paper = StatusPaper(size=64)
    paper.feed(*(event_types.NodeRanks(node, f"host-{node}", 16 * node, 16 * node + 15) for node in range(4)))
    paper.feed(*(metric(1.0, rank) for rank in range(60)))
    assert paper.open == [
        "node 0 · host-0, ranks 0–15: loss 1 mean of 16  step 7",
        "node 1 · host-1, ranks 16–31: loss 1 mean of 16  step 7",
        "node 2 · host-2, ranks 32–47: loss 1 mean of 16  step 7",
        "node 3 · host-3, ranks 48–59: loss 1 mean of 12  step 7",
    ]


# -------------------------------------------------------------------------------------------------------------------- a log


def test_a_log_reports_now_and_then_where_the_ranks_are():
    paper = StatusPaper(redraws=False)
    paper.feed(bar(), metric(2.0), seconds=5)
    assert paper.texts == []
    paper.feed(seconds=10)
    assert paper.texts == ["[0] epoch 1 █████░░░░░░░ 4/10 2 it/s 00:03  loss 2  step 7"]


def test_a_log_of_ten_hours_stays_short_and_does_not_repeat_what_has_not_moved():
    moving, still = StatusPaper(redraws=False), StatusPaper(redraws=False)
    still.feed(metric(2.0))
    for minute in range(600):
        moving.feed(metric(minute, step=minute), seconds=60)
        still.feed(seconds=60)
    assert 50 < len(moving.texts) < 200
    assert still.texts == ["[0] loss 2  step 7"]


@pytest.mark.parametrize("redraws", [False, True])
def test_a_run_without_metrics_and_bars_shows_its_lines_and_nothing_else(redraws):
    paper = StatusPaper(redraws=redraws)
    written = event_types.LogLine(0, "stdout", "a", 1.0)
    paper.feed(event_types.StateChange(0, "running", 1.0, "4711"), written, seconds=1000)
    assert paper.open == []
    assert paper.end() == ["[0] a"]


# ------------------------------------------------------------------------------------------------------------- what happened


def test_each_restart_is_reported_once_with_why_the_former_attempt_ended():
    paper = StatusPaper()
    paper.feed(event_types.StateChange(0, "running", 1.0, "100"), event_types.StateChange(1, "running", 1.0, "101"))
    assert paper.texts == []
    restart = event_types.Restart(1, 3, "rank 1 ended with SIGKILL", 0.1, 2.0)
    paper.feed(restart, event_types.StateChange(0, "starting", 2.0))
    paper.feed(event_types.StateChange(0, "running", 2.0, "200"))
    assert paper.texts == ["... restart 1 of 3, after 0.1 s: rank 1 ended with SIGKILL ..."]
    paper.feed(event_types.Restart(2, 3, "rank 0 stopped with KeyError: 'x'", 0.0, 3.0))
    assert paper.texts[1:] == ["... restart 2 of 3: rank 0 stopped with KeyError: 'x' ..."]


def test_a_rank_that_failed_alone_is_reported_once():
    paper = StatusPaper()
    paper.feed(event_types.Failure(1, "KeyError", "'x'\nmore", "", time.time()))
    assert paper.texts == []  # mostly it ends the others, and the error says it all
    paper.feed(event_types.Failure(1, "KeyError", "'x'\nmore", "", time.time() - 60))
    paper.feed()
    assert paper.texts == ["... rank 1 stopped with KeyError: 'x'; other ranks go on ..."]


def test_a_requested_stop_is_reported():
    paper = StatusPaper()
    paper.feed(event_types.StateChange(None, "stopping", 1.0))
    paper.feed()
    assert paper.texts == ["... the run was asked to stop ..."]


def test_an_idle_time_is_reported_once_and_again_when_it_has_lasted_twice_as_long():
    paper = StatusPaper()
    for seconds in (60, 70, 80, 119, 120, 130):
        paper.feed(event_types.IdleWarning(seconds, f"nothing for {seconds} s", 1.0))
    paper.feed(event_types.IdleWarning(0, "", 1.0))
    paper.feed(event_types.IdleWarning(60, "nothing for 60 s anew", 1.0))
    assert paper.texts == ["... nothing for 60 s ...", "... nothing for 120 s ...", "... nothing for 60 s anew ..."]


# ------------------------------------------------------------------------------------------------------------------- the end


def test_a_run_with_metrics_ends_with_a_summary():
    paper = StatusPaper()
    for step in range(8):
        paper.feed(metric(8.0 - step, step=step), metric(1.0, name="lr", step=step))
    paper.feed(event_types.StateChange(0, "finished", 1.0), event_types.StateChange(1, "failed", 1.0))
    assert paper.end("failed") == [
        "train failed after 01:15 (finished: 0, failed: 1)",
        "  loss  █▇▆▅▄▃▂▁  min 1  max 8  last 1  step 7",
        "  lr    ▄▄▄▄▄▄▄▄  min 1  max 1  last 1  step 7",
    ]


def test_the_summary_is_written_once_and_not_before_the_end():
    paper = StatusPaper()
    paper.feed(metric(1.0))
    paper.front_end.closed()
    assert paper.texts == []
    paper.front_end.opened(paper.run)
    paper.end()
    paper.front_end.opened(paper.run)
    paper.front_end.closed()
    assert [text for text in paper.texts if text.startswith("train")] == ["train finished after 01:15"]


def test_a_hundred_metrics_are_summed_up():
    paper = StatusPaper()
    paper.feed(*(metric(1.0, name=f"metric {number}") for number in range(100)))
    texts = paper.end()
    assert len(texts) == 22
    assert texts[-1] == "… and 80 more metrics"


def test_a_run_shown_again_is_its_report():
    paper = StatusPaper()
    run = SimpleNamespace(view=stories.failed(), folder=Path("/runs/1"), name="train", why="", started=0.0, done=True)
    paper.front_end.show(run)
    (data,) = paper.shown
    assert "rank 1 stopped with ValueError" in data["text/plain"]
    assert "rank 1 stopped with ValueError" in data["text/html"]
