"""What a person sees and presses in the panel."""

import re
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.browser.page.feeds import GIB, STACKS, STARTED, failed, give, running, sent, start

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect


def _rows(page: Any) -> Any:
    return page.locator(".anb-ranks .anb-row:not(.anb-header)")


def _log(page: Any) -> Any:
    return page.locator(".anb-output .anb-log").first


def _lines(number: int, size: int = 2) -> list[list[Any]]:
    return [[i % size, 0, f"line {i}", STARTED + i, 0] for i in range(number)]


# Stands in for the browser's own, of which a browser without a window shows none; it counts what the page requests.
STUB = """() => {
  window.notified = [];
  window.Notification = class {
    static permission = "default";
    static requests = 0;
    static async requestPermission() { Notification.requests++; Notification.permission = "granted"; }
    constructor(title, { body, tag }) { notified.push([title, body, tag]); }
  };
}"""


def test_a_run_that_took_a_minute_is_notified_of_once_the_bell_was_pressed(page: Any, show: Any) -> None:
    page.evaluate(STUB)
    show([start(2)])
    bell = page.get_by_role("button", name="Notify me when the run is over")
    expect(bell).to_have_attribute("aria-pressed", "false")
    give(page, seq=2, state={"state": "finished", "ended": STARTED + 74})
    give(page, **start(2))
    assert page.evaluate("[Notification.requests, notified]") == [0, []]
    bell.click()
    expect(bell).to_have_attribute("aria-pressed", "true")
    give(page, seq=2, state={"state": "finished", "ended": STARTED + 59})
    give(page, **start(2))
    failure = {"rank": 1, "type": "KeyError", "message": "'label'"}
    give(page, seq=2, failure=failure, state={"state": "failed", "ended": STARTED + 74})
    give(page, seq=3, line_count=1)
    told = ["train failed", "after 01:14, rank 1: KeyError: 'label'", "/home/me/.accelerate_nb/runs/train-7"]
    assert page.evaluate("[Notification.requests, notified]") == [1, [told]]
    give(page, **start(2))
    bell.click()
    expect(bell).to_have_attribute("aria-pressed", "false")


SCROLLS = """() => {
  const notebook = document.querySelector(".jp-Notebook");
  notebook.style = "height: 600px; overflow: auto";
  notebook.append(Object.assign(document.createElement("div"), { style: "height: 5000px" }));
}"""
AWAY = "() => { document.querySelector('.jp-Notebook').scrollTop = 3000; }"


def test_a_run_in_the_background_has_a_line_in_sight_with_its_stop_until_it_is_closed(page: Any, show: Any) -> None:
    page.evaluate(SCROLLS)
    show(running(2))
    line, pin = page.locator(".anb-run-bar"), page.get_by_role("button", name="Pin", exact=True)
    page.evaluate(AWAY)
    expect(page.locator(".anb-head")).not_to_be_in_viewport()
    expect(line).to_be_hidden()
    give(page, seq=3, run={"background": True})
    expect(line).to_contain_text("epoch 3/10")
    expect(line).to_be_in_viewport()
    line.get_by_role("button", name="Stop").click()
    assert len(sent(page, "stop")) == 1
    line.get_by_role("button", name="train").click()
    expect(line).to_be_hidden()
    expect(pin).to_be_focused()
    page.evaluate(AWAY)
    expect(line).to_be_in_viewport()
    give(page, seq=4, state={"state": "finished", "ended": STARTED + 80})
    expect(line).to_contain_text("finished")
    line.get_by_role("button", name="Close this line").click()
    expect(line).to_be_hidden()


def test_a_run_whose_panel_is_taken_away_in_sight_leaves_no_line(page: Any, show: Any) -> None:
    page.evaluate(SCROLLS)
    page.evaluate("() => { window.removed = window.start(); }")
    give(page, **start(2, background=True))
    expect(page.get_by_role("button", name="Pin", exact=True)).to_be_visible()
    page.evaluate("() => removed()")
    expect(page.locator(".anb")).to_have_count(0)
    # it would come when the browser says that the panel is out of sight: before the next observer is told of its element
    page.evaluate("() => new Promise((done) => new IntersectionObserver(done).observe(document.body))")
    expect(page.locator(".anb-run-bar")).to_have_count(0)


def test_runs_that_are_over_share_one_line_which_is_gone_once_they_were_seen(page: Any, show: Any) -> None:
    page.evaluate(SCROLLS)
    page.evaluate("() => { window.start(); }")
    show([start(2, background=True)])
    lines = page.locator(".anb-run-bar:visible")
    page.evaluate(AWAY)
    expect(lines).to_have_count(2)
    give(page, seq=2, state={"state": "finished", "ended": STARTED + 80})
    expect(lines).to_have_count(1)
    expect(lines).to_contain_text("and train finished")
    page.evaluate("() => { document.querySelector('.jp-Notebook').scrollTop = 0; }")
    expect(lines).to_have_count(0)
    page.evaluate(AWAY)
    expect(page.locator(".anb-head").last).not_to_be_in_viewport()
    expect(lines).to_have_count(0)


# ------------------------------------------------------------------------------------------------------------------- head


def test_restarts_are_counted_in_the_head_and_reported_with_what_ended_each_attempt(page: Any, show: Any) -> None:
    show(running(2))
    expect(page.locator(".anb-restarts")).to_be_hidden()
    expect(page.locator(".anb-ranks .anb-bar.anb-none")).to_have_count(0)
    first, second = [1, 3, "restart 1 of 3: rank 1 <b>failed</b>"], [2, 3, "restart 2 of 3: rank 0 failed"]
    give(page, seq=3, restarts=[first])
    expect(page.locator(".anb-facts")).to_contain_text("restart 1 of 3")
    expect(page.locator(".anb-restarts")).to_have_text("restart 1 of 3: rank 1 <b>failed</b>")
    expect(page.locator(".anb-ranks .anb-bar.anb-none")).to_have_count(2)
    give(page, seq=4, restarts=[first, second])
    expect(page.locator(".anb-restart")).to_have_count(2)
    fewer, more = (
        [3, 3, "a node was lost; 1 of 2 ranks starts again", 1],
        [4, 4, "node 1 has come; 3 ranks start again", 3],
    )
    page.get_by_role("tab", name="rank 1").click()
    give(page, seq=5, restarts=[first, second, fewer])
    expect(_rows(page)).to_have_count(1)
    expect(page.get_by_role("log")).to_have_accessible_name("output of all ranks")
    give(page, seq=6, restarts=[first, second, fewer, more])
    expect(_rows(page)).to_have_count(3)


def test_ranks_that_a_restart_left_out_are_in_no_overview_and_hold_back_no_value(page: Any, show: Any) -> None:
    show(running(40, 3))
    expect(page.locator(".anb-heat")).to_have_count(40)
    give(page, seq=3, restarts=[[1, 3, "a node was lost", 36]])
    give(page, seq=4, metrics=[["loss", rank, [[900, 7.25, STARTED + 80]]] for rank in range(36)])
    expect(page.locator(".anb-heat")).to_have_count(36)
    expect(page.get_by_role("group", name="metric loss").locator(".anb-chart-value")).to_have_text("7.250")


def test_it_sends_hello_and_its_head_shows_what_runs_where_since_when(page: Any, show: Any) -> None:
    show(running(4))
    (hello,) = sent(page, "hello")
    assert hello["view"]
    expect(page.get_by_role("heading", name="train")).to_be_visible()
    expect(page.locator(".anb-title .anb-chip")).to_contain_text("running")
    expect(page.locator(".anb-elapsed")).to_have_text(re.compile("01:1[4-9]"))
    facts = page.locator(".anb-facts")
    # three of ten epochs are begun; the slowest rank has 7.5 of them, of 600 steps at 24.25 a second, before it
    expect(facts).to_have_text(re.compile(r"^4 × GPU · epoch 3/10 · 25 % · 24\.3 it/s · ends \d\d:\d\d \(in 3 min\)$"))
    expect(facts).to_have_attribute(
        "title", re.compile("^cuda:0 … cuda:3\n.* lines\nlocal: one machine, the supervisor is warm$")
    )


def test_the_head_names_the_precision_and_a_row_leaves_the_process_to_its_tooltip(page: Any, show: Any) -> None:
    show([start(2)], precision="bf16", ranks=[[0, "running", "process 4711", 0], [1, "failed", "exit code 1", 0]])
    expect(page.locator(".anb-facts")).to_have_text("2 ranks · bf16")
    rows = _rows(page)
    expect(rows.first).not_to_contain_text("process")
    expect(rows.first.locator(".anb-chip")).to_have_attribute("title", "process 4711")
    expect(rows.last).to_contain_text("exit code 1")
    give(page, seq=3, precision="no")
    expect(page.locator(".anb-facts")).to_have_text("2 ranks")


def test_a_rank_s_steps_and_memory_are_strips_and_what_makes_steps_slow_a_sentence(page: Any, show: Any) -> None:
    show([start(2)])
    expect(page.locator(".anb-legend").first).to_be_hidden()
    give(page, seq=2, steps=[[0, [6.2, 1.0, 2.0, 0.0, 0.8, 0.0]]], causes=["rank 0 is slow"])
    strip = page.get_by_role(
        "img", name="rank 0 step: 10.0 ms a step: data 62 %, forward 10 %, backward 20 %, optimizer 8 %"
    )
    expect(strip).to_be_visible()
    widths = strip.evaluate("(strip) => [...strip.children].map((part) => part.clientWidth / strip.clientWidth)")
    assert widths == pytest.approx([0.62, 0.1, 0.2, 0, 0.08, 0], abs=0.02)
    expect(page.get_by_role("img", name="rank 1 step")).to_have_count(0)
    expect(page.locator(".anb-legend").first).to_contain_text("communication")
    expect(page.get_by_role("group", name="What makes steps slow")).to_have_text("→ rank 0 is slow")
    give(page, seq=3, causes=[], memory=[[0, [10, 10, 20, 30, 10], 100, "peak 80 of 100 B"]])
    expect(page.get_by_role("group", name="What makes steps slow")).to_be_hidden()
    strip = page.get_by_role("img", name="rank 0 memory: peak 80 of 100 B")
    expect(strip).to_be_visible()
    shares = "(strip) => [...strip.children].map((part) => part.getBoundingClientRect().width / strip.clientWidth)"
    assert strip.evaluate(shares) == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.1], abs=0.02)
    expect(page.locator(".anb-legend", has_text="activations")).to_be_visible()


def test_ranks_that_report_the_same_are_one_row_until_it_is_unfolded(page: Any, show: Any) -> None:
    bars = [[rank, "train", 50 + rank, 100, 9, "it", 0] for rank in range(8)]
    loss = [["loss", rank, _points(0.5 + rank / 10)] for rank in range(8)]
    cuda = [[rank, f"cuda:{rank}", 80 + rank, 10 * GIB, 80 * GIB] for rank in range(8)]
    states = [[rank, "running", "", 0] for rank in range(8)]
    steps = [[rank, [1.0, 2.0, 3.0, 0.0, 4.0, 0.0]] for rank in range(8)]
    show([start(8)], ranks=states, progress=bars, metrics=loss, devices=cuda, steps=steps)
    rows = _rows(page)
    expect(rows).to_have_count(1)
    # the slowest leads
    expect(rows.locator(".anb-bar-text")).to_contain_text("50–57/100")
    expect(rows).to_contain_text("0.5000–1.200")
    # also of a rank that does not lead
    give(page, seq=3, metrics=[["reward", 3, [[0, "nan", 0.0]]]])
    expect(rows.locator(".anb-bad")).to_have_text("nan")
    expect(rows).to_contain_text("8 × cuda")
    expect(rows).to_contain_text("84 %")
    expect(page.get_by_role("img", name=re.compile("^ranks 0–7 step: 10.0 ms"))).to_be_visible()
    # who fails stands alone, and too few others do
    give(page, seq=4, ranks=[[5, "failed", "exit code 1", 0]])
    expect(rows).to_have_count(4)
    names = [name.strip() for name in rows.get_by_role("rowheader").all_inner_texts()]
    assert names == ["0–4", "5", "6", "7"]
    page.get_by_role("button", name="ranks 0–4: show each").click()
    expect(rows).to_have_count(8)
    expect(page.get_by_role("button", name="Fold", exact=True)).to_be_focused()
    page.keyboard.press("Enter")
    expect(rows).to_have_count(4)
    expect(page.get_by_role("button", name="ranks 0–4: show each")).to_be_focused()


def _two_nodes(page: Any, show: Any, size: int) -> None:
    half = size // 2
    nodes = [[0, "node 0 · a", 0, half - 1], [1, "node 1 · <b>", half, size - 1]]
    bars = [[rank, "train", 50 + rank % 2, 100, 9, "it", 0] for rank in range(size)]
    show([start(size)], nodes=nodes, ranks=[[rank, "running", "", 0] for rank in range(size)], progress=bars)


def test_ranks_stand_under_the_heading_of_their_node_which_folds_them_away(page: Any, show: Any) -> None:
    _two_nodes(page, show, 4)
    rows = _rows(page)
    expect(rows).to_have_count(6)
    heads = [head.replace("▾", "").split() for head in rows.get_by_role("rowheader").all_inner_texts()]
    assert [" ".join(head) for head in heads] == [
        *("node 0 · a ranks 0–1 ▶ running", "0", "1"),
        *("node 1 · <b> ranks 2–3 ▶ running", "2", "3"),
    ]
    # a node is as its ranks are: one that has failed leads
    give(page, seq=3, ranks=[[3, "failed", "exit code 1", 0]])
    expect(rows.nth(3).locator(".anb-chip")).to_have_text("✕failed")
    expect(rows.nth(0).locator(".anb-chip")).to_have_text("▶running")
    give(page, seq=4, loads=[[1, 47.6, 12 * GIB, 64 * GIB]])
    expect(rows.nth(3)).to_contain_text("CPU 48 % · memory 12.0/64.0 GiB")
    expect(rows.nth(0)).not_to_contain_text("CPU")
    first = page.get_by_role("button", name="node 0 · a")
    first.click()
    expect(rows).to_have_count(4)
    expect(first).to_have_attribute("aria-expanded", "false")
    # the slowest of those that are out of sight, up to the fastest
    expect(rows.nth(0)).to_contain_text("50–51/100")
    expect(first).to_be_focused()
    page.keyboard.press("Enter")
    expect(rows).to_have_count(6)


def test_ranks_that_report_the_same_are_one_row_a_node_and_each_node_is_unfolded_by_itself(
    page: Any, show: Any
) -> None:
    _two_nodes(page, show, 16)
    rows = _rows(page)
    expect(rows).to_have_count(4)
    page.get_by_role("button", name="ranks 8–15: show each").click()
    expect(rows).to_have_count(11)
    expect(page.get_by_role("button", name="ranks 0–7: show each")).to_be_visible()
    expect(page.get_by_role("button", name="Fold", exact=True)).to_be_focused()
    page.keyboard.press("Enter")
    expect(rows).to_have_count(4)


def test_many_nodes_of_few_ranks_have_two_rows_each(page: Any, show: Any) -> None:
    nodes = [[node, f"node {node}", 4 * node, 4 * node + 3] for node in range(8)]
    show([start(32)], nodes=nodes, ranks=[[rank, "running", "", 0] for rank in range(32)])
    expect(_rows(page)).to_have_count(16)


def test_the_tab_shows_how_far_the_run_is_until_it_ends_and_with_it_its_clock(page: Any, show: Any) -> None:
    show(running(1))
    expect(page).to_have_title("\u280025 % · 3 min left\u2800 panel")
    # a notebook that writes its title anew, and looks at nothing else
    page.evaluate("document.title = 'renamed'")
    expect(page).to_have_title("\u280025 % · 3 min left\u2800 renamed")
    give(page, seq=3, state={"state": "finished", "detail": "", "ended": STARTED + 3600})
    expect(page).to_have_title("renamed")
    expect(page.locator(".anb-elapsed")).to_have_text("1:00:00")
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    expect(page.locator(".anb [role=status][aria-live=polite]").last).to_have_text("train: finished")


def test_a_run_without_bars_shows_its_epoch_and_steps_a_second(page: Any, show: Any) -> None:
    show([start(2)])
    expect(page.locator(".anb-facts")).to_have_text("2 ranks")
    give(page, seq=2, metrics=[["epoch", 0, _points(1.5)], ["speed/step_time_s", 0, _points(0.25)]])
    expect(page.locator(".anb-facts")).to_have_text("2 ranks · epoch 1.500 · 4 steps/s")


def test_a_rank_that_is_behind_the_others_is_coloured_and_shows_how_far(page: Any, show: Any) -> None:
    epochs = [[rank, "epoch", done, 10, 0.1, "it", 0, "outer"] for rank, done in enumerate((5, 5, 3))]
    show([start(3)], progress=[*epochs, *([rank, "train", 50, 100, 9, "it", 0, "inner"] for rank in range(3))])
    late = page.locator(".anb-ranks .anb-late")
    expect(late).to_have_count(1)
    expect(late.locator(".anb-bar-text")).to_contain_text("−2 epochs · 50/100")
    expect(late.get_by_role("progressbar")).to_have_attribute("aria-valuetext", re.compile("−2 epochs$"))
    # half an epoch is nothing to worry about
    give(page, seq=3, progress=[[2, "epoch", 5, 10, 0.1, "it", 0, "outer"], [2, "train", 0, 100, 9, "it", 0, "inner"]])
    expect(late).to_have_count(0)


@pytest.mark.parametrize(
    ("label", "unit", "text"),
    [("train", "it", "−50 it"), ("epoch", "it", "−50 epochs"), ("train", "batch", "−50 batch")],
)
def test_how_far_a_rank_is_behind_is_in_units_of_its_bar(
    page: Any, show: Any, label: str, unit: str, text: str
) -> None:
    show([start(3)], progress=[[rank, label, done, 100, 9, unit, 0] for rank, done in enumerate((90, 90, 40))])
    expect(page.locator(".anb-ranks .anb-late .anb-bar-text")).to_contain_text(f"{text} · 40/100")


def test_a_run_without_steps_has_no_speed_and_no_end(page: Any, show: Any) -> None:
    bars = [[rank, "train", 50, 100, 9.0, "it", 0] for rank in range(2)]
    show([start(2)], now=STARTED + 74, progress=bars)
    facts, row = page.locator(".anb-facts"), _rows(page).nth(0)
    expect(facts).to_contain_text("9.0 it/s · ends")
    expect(row).to_contain_text("50/100 · 9.0 it/s · 00:05 left")
    # the bar is drawn anew where it stands; what came is that the machine is there
    give(page, seq=3, now=STARTED + 83, progress=bars)
    expect(facts).to_have_text(re.compile(r"^2 ranks · train 50/100 · 50 % · no step for (9|\d\d) s$"))
    expect(row).to_contain_text("50/100")
    assert "it/s" not in row.inner_text()
    assert "left" not in row.inner_text()
    expect(page).to_have_title(re.compile("50 %\u2800"))
    give(page, seq=4, now=STARTED + 84, progress=[[0, "train", 51, 100, 9.0, "it", 0]])
    expect(facts).to_contain_text("9.0 it/s · ends")
    expect(row).to_contain_text("9.0 it/s")


def test_long_steps_keep_their_speed(page: Any, show: Any) -> None:
    show([start(1)], now=STARTED + 74, metrics=[["speed/step_time_s", 0, [[7, 20.0, STARTED + 70]]]])
    give(page, seq=3, now=STARTED + 130, host=[["cpu", 9, 100, "%"]])
    expect(page.locator(".anb-facts")).to_contain_text("0.05000 steps/s")
    give(page, seq=4, now=STARTED + 174, host=[["cpu", 10, 100, "%"]])
    expect(page.locator(".anb-facts")).to_have_text("1 rank · no step for 2 min")


@pytest.mark.parametrize(
    ("bars", "share", "left"),
    [
        # [done, total, rate], outermost first
        ([], None, None),
        ([[5, None, 2]], None, None),
        ([[25, 100, 5]], 0.25, 15),
        ([[1, 4, None], [50, 100, 10]], 0.375, 25),
        # the outer bar's own rate knows of what is between the inner ones
        ([[1, 4, 0.05], [50, 100, 10]], 0.375, 50),
        ([[0, 2, None], [1, 5, None], [5, 10, 10]], 0.15, 8.5),
        ([[4, 4, None], [100, 100, 10]], 1, 0),
        ([[1, 4, None], [7, None, 3]], 0.25, None),
    ],
)
def test_the_end_of_a_run_is_known_from_nested_bars(
    page: Any, bars: list[list[float]], share: float, left: float
) -> None:
    found = page.evaluate(
        "(bars) => { const made = bars.map(([done, total, rate]) => ({ done, total, rate }));"
        " return [panel.shareDone(made), panel.secondsLeft(made)]; }",
        bars,
    )
    assert found == pytest.approx([share, left])


@pytest.mark.parametrize(
    ("label", "facts"),
    [
        ("epoch 4 of 8", r"epoch 4/8 · 43 % · 10\.0 it/s · ends \d\d:\d\d \(in 45 s\)"),
        ("Epoch [4/8]", r"Epoch 4/8 · 43 % · 10\.0 it/s · ends \d\d:\d\d \(in 45 s\)"),
        ("train 9/8", r"train 9/8 50/100 · 50 % · 10\.0 it/s · ends \d\d:\d\d \(in 5 s\)"),
    ],
)
def test_a_label_that_counts_epochs_is_a_bar_around_the_epoch_s(page: Any, show: Any, label: str, facts: str) -> None:
    show([start(1)], ranks=[[0, "running", "", 0]], progress=[[0, label, 50, 100, 10, "it", 0]])
    expect(page.locator(".anb-facts")).to_have_text(re.compile(f"{facts}$"))


def test_stop_interrupts_first_and_a_second_press_kills(page: Any, show: Any) -> None:
    show(running(2))
    page.get_by_role("button", name="Stop", exact=True).dblclick()
    assert sent(page, "stop") == [{"do": "stop"}]
    expect(page.locator(".anb-title .anb-chip")).to_contain_text("stopping")
    page.get_by_role("button", name="Kill").click()
    assert sent(page, "kill") == [{"do": "kill"}]
    assert len(sent(page, "stop")) == 1


def test_a_run_that_is_stopping_already_offers_to_kill(page: Any, show: Any) -> None:
    show(running(2), state={"state": "stopping", "detail": "", "ended": None})
    page.get_by_role("button", name="Kill").click()
    assert sent(page, "kill") == [{"do": "kill"}]


def test_buttons_stand_only_where_they_work(page: Any, show: Any) -> None:
    show([start(2, can_act=False)])
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    expect(page.get_by_role("button", name="Stacks")).to_be_hidden()
    expect(page.get_by_role("button", name="Freeze view")).to_be_hidden()


def test_a_background_run_can_be_left_alone_for_a_while(page: Any, show: Any) -> None:
    show([start(2, background=True)])
    page.get_by_role("button", name="Freeze view").click()
    give(page, seq=2, lines=[[0, 0, "while nobody looks", 0.0, 0]])
    page.wait_for_timeout(500)
    expect(page.get_by_text("while nobody looks")).to_have_count(0)
    page.get_by_role("button", name="Unfreeze view").click()
    expect(page.get_by_text("while nobody looks")).to_be_visible()
    # what is frozen when the run ends shows its end
    page.get_by_role("button", name="Freeze view").click()
    give(page, seq=3, state={"state": "finished", "ended": STARTED + 75})
    expect(page.locator(".anb-head")).to_contain_text("finished")
    expect(page.locator(".anb-head")).not_to_contain_text("frozen")


def test_stacks_are_requested_shown_marked_copied_and_closed(page: Any, show: Any) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    show(running(3))
    page.get_by_role("button", name="Stacks").click()
    assert sent(page, "stacks") == [{"do": "stacks"}]
    give(page, seq=3, stacks={"text": STACKS})
    stacks = page.get_by_role("region", name="Stacks")
    expect(stacks.locator(".anb-stack")).to_have_count(3)
    expect(stacks.locator(".anb-odd")).to_have_count(1)
    expect(stacks.locator(".anb-odd")).to_contain_text("rank 1:   ◀ elsewhere than the others")
    stacks.get_by_role("button", name="Copy").click()
    expect(stacks.get_by_role("button", name="Copied")).to_be_visible()
    # the clipboard is read only on a page of its own origin with focus
    assert page.evaluate("() => navigator.clipboard?.readText() ?? null") in (STACKS, None)
    stacks.get_by_role("button", name="Close").click()
    expect(stacks).to_be_hidden()
    expect(page.get_by_role("button", name="Stacks")).to_be_focused()
    give(page, seq=4, stacks={"text": STACKS})
    expect(stacks).to_be_visible()


def test_an_idle_run_offers_stacks_and_promises_no_end(page: Any, show: Any) -> None:
    show(running(2))
    facts = page.locator(".anb-facts")
    expect(facts).to_contain_text("(in 3 min)")
    give(page, seq=3, idle_warning={"seconds": 65, "text": "Rank 1 is elsewhere."})
    warning = page.get_by_role("region", name="No output for a while")
    expect(warning).to_contain_text("Rank 1 is elsewhere.")
    expect(facts).not_to_contain_text("ends")
    expect(facts).to_contain_text("25 %")
    expect(page).to_have_title("\u280025 %\u2800 panel")
    warning.get_by_role("button", name="Stacks").click()
    assert len(sent(page, "stacks")) == 1
    give(page, seq=4, idle_warning=None)
    expect(warning).to_be_hidden()
    expect(facts).to_contain_text("(in 3 min)")


def test_the_kernel_receives_how_far_the_page_is_and_gaps_and_skipped_lines_are_admitted(page: Any, show: Any) -> None:
    show(running(1))
    page.wait_for_function("model.sent.some((one) => one.do === 'ack' && one.seq === 2)")
    for seq in range(3, 30):
        give(page, seq=seq)
    page.wait_for_function("model.sent.some((one) => one.do === 'ack' && one.seq === 29)")
    assert len(sent(page, "ack")) <= 5
    notes = page.locator(".anb-notes")
    expect(notes).to_have_text("")
    give(page, seq=32, skipped=12000)
    expect(notes).to_contain_text("2 messages from the kernel did not arrive")
    expect(notes).to_contain_text("12,000 lines are only in the files")


# ------------------------------------------------------------------------------------------------------------------ ranks


def test_a_row_shows_state_progress_metrics_and_device(page: Any, show: Any) -> None:
    show(running(2))
    row = _rows(page).nth(1)
    expect(row.locator(".anb-chip")).to_contain_text("running")
    expect(row.get_by_role("progressbar")).to_have_attribute("aria-valuenow", "54")
    expect(row).to_contain_text("epoch 3/10 · train")
    expect(row).to_contain_text("326/600 · 24.8 it/s · 00:11 left")
    expect(row).to_contain_text("cuda:1")
    expect(row).to_contain_text("81 %")
    expect(row).to_contain_text("55.0/80.0 GiB")
    expect(page.locator(".anb-ranks .anb-header")).to_contain_text("loss")


def test_a_bar_without_a_total_and_a_slow_one(page: Any, show: Any) -> None:
    bars = [[0, "read", 1234, None, 20.0, "rows", 0], [1, "save", 1, 4, 0.1, "file", 0]]
    show([start(2)], progress=bars)
    expect(_rows(page).nth(0)).to_contain_text("1,234 rows · 20.0 rows/s")
    expect(_rows(page).nth(1)).to_contain_text("1/4 · 10.0 s/file · 00:30 left")


def test_a_device_that_has_not_reported_how_busy_it_is_shows_its_memory_whole(page: Any, show: Any) -> None:
    gib = 55 * GIB
    show([start(2)], devices=[[0, "cuda:0", None, gib, 80 * GIB], [1, "cuda:1", None, gib, 80 * GIB]])
    text = _rows(page).nth(0).get_by_text("55.0/80.0 GiB")
    expect(text).to_be_visible()
    whole = "(text) => text.scrollWidth <= text.clientWidth + 1 && text.getBoundingClientRect().right <= text.closest('.anb').getBoundingClientRect().right"
    assert text.evaluate(whole)
    give(page, seq=3, devices=[[1, "cuda:1", 40, gib, 80 * GIB]])
    expect(_rows(page).nth(1)).to_contain_text("40 %")
    assert text.evaluate(whole)
    assert text.bounding_box()["x"] == _rows(page).nth(1).get_by_text("55.0/80.0 GiB").bounding_box()["x"]


def test_a_metric_that_is_not_a_number_stands_out(page: Any, show: Any) -> None:
    show([start(1)], metrics=[["loss", 0, [[0, 1.0, 0], [1, "nan", 0]]]])
    expect(_rows(page).locator(".anb-bad")).to_have_text("nan")
    expect(page.locator(".anb-chart-note")).to_have_text("⚠ NaN since step 1")


def test_a_machine_that_is_nearly_full_warns_and_a_busy_processor_is_no_alarm(page: Any, show: Any) -> None:
    show(running(1))
    hot = page.locator(".anb-host-one", has=page.locator(".anb-hot"))
    expect(hot).to_have_count(1)
    expect(hot).to_contain_text("disk")
    expect(hot).to_contain_text("⚠ 1.9/2.0 TiB")
    give(page, seq=3, host=[["disk", 10 * GIB, 2048 * GIB, "B"]])
    expect(hot).to_have_count(0)
    give(page, seq=4, host=[["cpu", 100.0, 100.0, "%"], ["memory", 99, 100, "B"]])
    expect(page.get_by_role("meter", name="cpu")).to_have_attribute("aria-valuetext", "100 %")
    expect(page.get_by_role("group", name="this machine")).not_to_contain_text("⚠ 100 %")
    expect(page.get_by_role("meter", name="cpu")).to_have_class("anb-meter")
    expect(page.get_by_role("meter", name="memory", exact=True)).to_have_class("anb-meter anb-hot")


# what is drawn over something else, or out of the panel: texts, bars, meters and strips, as far as nothing clips them
_OVERLAPS = """() => {
  const root = document.querySelector(".anb"), outer = root.getBoundingClientRect(), found = [];
  const add = (rect, element, text) => {
    let { left, right, top, bottom } = rect;
    for (let above = element; above !== document.body; above = above.parentElement) {
      if (getComputedStyle(above).overflowX === "visible") continue;
      const box = above.getBoundingClientRect();
      [left, right, top, bottom] = [Math.max(left, box.left), Math.min(right, box.right), Math.max(top, box.top), Math.min(bottom, box.bottom)];
    }
    if (right - left > 1 && bottom - top > 1) found.push({ left, right, top, bottom, element, text });
  };
  const texts = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  for (let node = texts.nextNode(); node; node = texts.nextNode()) {
    if (!node.data.trim() || node.parentElement.closest(".anb-sr, .anb-log, option, style")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const rect of range.getClientRects()) add(rect, node.parentElement, node.data);
  }
  for (const element of root.querySelectorAll(".anb-bar, .anb-meter, .anb-phases, canvas, input, select")) add(element.getBoundingClientRect(), element, element.className || element.tagName);
  const bad = found.filter((a) => a.left < outer.left - 1 || a.right > outer.right + 1).map((a) => `outside: ${a.text}`);
  found.forEach((a, i) => found.slice(i + 1).forEach((b) => {
    if (a.element.contains(b.element) || b.element.contains(a.element)) return;
    if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2) bad.push(`${a.text} | ${b.text}`);
  }));
  return [Math.min(...[...root.querySelectorAll(".anb-bar")].map((bar) => bar.getBoundingClientRect().width)), bad];
}"""
_FRAMES = "async () => { for (let i = 0; i < 3; i++) await new Promise(requestAnimationFrame); }"


@pytest.mark.parametrize(
    "size", [pytest.param(1, marks=pytest.mark.slow), 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 8))]
)
def test_bars_have_room_and_nothing_overlaps_at_any_width(page: Any, show: Any, size: int) -> None:
    first, body = running(size, steps=40)
    names = {"loss": "train/loss", "lr": "validation/learning_rate_of_the_first_group"}
    body["metrics"] = [[names.get(name, name), rank, points] for name, rank, points in body["metrics"]]
    body["coordinates"] = [[rank, f"fsdp {rank} of {size} · tp 0 of 1"] for rank in range(size)]
    # so far apart that they are not folded into one row
    body["progress"] = [[rank, "training the model", 332 - 60 * (rank % 2), 600, 25.0, "it", 0] for rank in range(size)]
    show([first, body])
    for width in range(500, 2001, 50):
        page.set_viewport_size({"width": width, "height": 900})
        page.evaluate(_FRAMES)
        least, bad = page.evaluate(_OVERLAPS)
        assert (least >= 220, bad) == (True, []), f"at {width} px the narrowest bar has {least:.0f} px"


def test_sixty_four_ranks_have_an_overview_and_a_list_to_choose_from(page: Any, show: Any) -> None:
    show(running(64))
    expect(page.locator(".anb-heat")).to_have_count(64)
    expect(page.get_by_role("tab")).to_have_count(0)
    page.get_by_role("button", name="rank 40: running", exact=False).first.click()
    expect(page.get_by_label("whose output", exact=True).locator("visible=true")).to_have_value("40")
    expect(_log(page)).to_contain_text("step")
    expect(page.get_by_role("button", name="Band")).to_have_attribute("aria-pressed", "true")
    assert page.locator(".anb-ranks").bounding_box()["height"] < 420
    give(page, seq=3, ranks=[[40, "failed", "KeyError", 3]])
    expect(page.get_by_role("button", name=re.compile("rank 40: failed"))).to_have_text("✕40")


# ----------------------------------------------------------------------------------------------------------------- output


def test_lines_of_all_ranks_of_one_and_side_by_side(page: Any, show: Any) -> None:
    show([start(3)], lines=[[0, 0, "from zero", 1.0, 0], [1, 0, "from one", 2.0, 0], [2, 1, "from two", 3.0, 0]])
    expect(_log(page).locator(".anb-line")).to_have_text([re.compile("zero"), re.compile("one"), re.compile("two")])
    page.get_by_role("tab", name="rank 1").click()
    expect(_log(page).locator(".anb-line")).to_have_text(["from one\n"])
    page.get_by_role("button", name="Side by side").click()
    expect(page.locator(".anb-side-box")).to_have_count(3)
    expect(page.get_by_role("log", name="output of rank 2")).to_contain_text("from two")
    give(page, seq=3, lines=[[2, 0, "still from two", 4.0, 0]])
    expect(page.get_by_role("log", name="output of rank 2")).to_contain_text("still from two")
    page.get_by_role("tab", name="all ranks").click()
    expect(page.locator(".anb-side-box")).to_have_count(0)


def test_a_line_is_marked_by_its_level_and_more_than_colour_and_errors_alone_can_be_searched(
    page: Any, show: Any
) -> None:
    by_level = [
        [0, 0, "printed", 1.0, 0],
        [0, 1, "INFO:root:begins", 1.0, 0],
        [0, 1, "WARNING:root:slow", 1.0, 0, "warning"],
        [0, 0, "ValueError: wrong", 1.0, 0, "error"],
        [0, 1, "100%|###| 3/3 [00:01<00:00, 3it/s]", 1.0, 0, "bar"],
    ]
    show([start(1)], lines=by_level)
    rows = _log(page).locator(".anb-line")
    expect(rows.locator(".anb-mark")).to_have_text(["", "╎ standard error ", "! warning ", "✖ error ", ""])
    plain, other, warning, error, bar = (
        rows.nth(number).evaluate("row => [getComputedStyle(row).backgroundColor, getComputedStyle(row).color]")
        for number in range(5)
    )
    # only what is an alarm has a ground of its own
    assert plain[0] == other[0] == bar[0]
    assert len({plain[0], warning[0], error[0]}) == 3
    assert plain[1] == other[1] != bar[1]
    page.get_by_role("button", name="Errors only").click()
    rows = _log(page).locator(".anb-line .anb-text")
    expect(rows).to_have_text(["ValueError: wrong\n"])
    give(page, seq=3, lines=[*by_level, [0, 1, "KeyError: wrong too", 1.0, 0, "error"]])
    expect(rows).to_have_text(["ValueError: wrong\n", "ValueError: wrong\n", "KeyError: wrong too\n"])
    page.get_by_role("searchbox").fill("r")
    expect(page.locator(".anb-found")).to_have_text("3 matches")
    page.get_by_role("button", name="Only matches").click()
    page.get_by_role("searchbox").fill("too")
    expect(rows).to_have_text(["KeyError: wrong too\n"])
    page.get_by_role("searchbox").fill("")
    page.get_by_role("button", name="Errors only").click()
    expect(rows).to_have_count(11)


def test_an_open_line_stands_last_and_moves(page: Any, show: Any) -> None:
    show([start(1)], lines=[[0, 0, "10 %", 1.0, 1], [0, 1, "note", 1.0, 0]])
    expect(_log(page).locator(".anb-line").last).to_have_text("10 %\n")
    give(page, seq=3, lines=[[0, 0, "20 %", 2.0, 1]])
    expect(_log(page).locator(".anb-line").last).to_have_text("20 %\n")
    give(page, seq=4, lines=[[0, 0, "done", 3.0, 0]])
    expect(_log(page).locator(".anb-line")).to_have_count(2)


def test_search_counts_steps_and_filters(page: Any, show: Any) -> None:
    show([start(2)], lines=_lines(400))
    search = page.get_by_label("search in the output")
    search.fill("LINE 39")
    found = page.locator(".anb-found")
    expect(found).to_have_text("11 matches")
    search.press("Enter")
    expect(found).to_have_text("1 of 11")
    expect(_log(page).locator(".anb-current")).to_contain_text("line 39")
    search.press("Enter")
    expect(_log(page).locator(".anb-current")).to_contain_text("line 390")
    page.get_by_role("button", name="previous match").click()
    page.get_by_role("button", name="previous match").click()
    expect(found).to_have_text("11 of 11")
    page.get_by_role("button", name="Only matches").click()
    expect(_log(page).locator(".anb-line")).to_have_count(11)
    expect(_log(page).locator("mark").first).to_have_text("line 39")
    give(page, seq=3, lines=[[0, 0, "one more line 39", 1.0, 0], [0, 0, "other", 1.0, 0]])
    expect(_log(page).locator(".anb-line")).to_have_count(12)
    search.fill("nowhere to be found")
    expect(found).to_have_text("0 matches")
    expect(page.locator(".anb-empty").locator("visible=true")).to_have_text("No line matches")
    search.press("Escape")
    expect(search).to_have_value("")
    # a match is found across colours
    give(page, seq=4, lines=[[0, 0, "lo\x1b[31mss 0\x1b[0m.5", 1.0, 0]])
    search.fill("loss 0.5")
    expect(found).to_have_text("1 match")
    assert "".join(_log(page).locator("mark").all_text_contents()) == "loss 0.5"


def test_the_search_shows_what_it_covers_where_the_page_does_not_hold_all_lines(page: Any, show: Any) -> None:
    ranks = [[0, "running", "", 500], [1, "running", "", 4]]
    show([start(2)], lines=_lines(8), ranks=ranks, line_count=504)
    page.get_by_role("searchbox").fill("line 2")
    found = page.locator(".anb-found")
    expect(found).to_have_text("1 match in the last 8 of 504 lines")
    page.get_by_role("tab", name="rank 0").click()
    expect(found).to_have_text("1 match in the last 4 of 500 lines")
    page.get_by_role("tab", name="rank 1").click()
    expect(found).to_have_text("0 matches")


def test_the_folder_of_the_run_is_shown_and_can_be_copied(page: Any, show: Any) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    show([start(1)])
    folder = page.evaluate("() => document.querySelector('.anb-path').textContent")
    assert folder.startswith("/")
    page.get_by_role("button", name="Copy path").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("() => navigator.clipboard.readText()") == folder


def test_an_empty_log_takes_no_room(page: Any, show: Any) -> None:
    show([start(1)])
    expect(page.locator(".anb-empty")).to_have_text("No output yet")
    expect(page.locator(".anb-jump")).to_be_hidden()
    assert page.locator(".anb-logbox").bounding_box()["height"] < 30
    give(page, seq=2, lines=_lines(3, 1))
    expect(_log(page).locator(".anb-line")).to_have_count(3)
    assert page.locator(".anb-logbox").bounding_box()["height"] > 200


def test_following_stops_when_one_scrolls_up_and_begins_again(page: Any, show: Any) -> None:
    show([start(2)], lines=_lines(500))
    expect(_log(page)).to_contain_text("line 499")
    follow = page.get_by_role("button", name="Follow")
    _log(page).hover()
    page.mouse.wheel(0, -2000)
    expect(follow).to_have_attribute("aria-pressed", "false")
    top = _log(page).evaluate("(log) => log.scrollTop")
    give(page, seq=3, lines=[[0, 0, "news", 1.0, 0]])
    jump = page.get_by_role("button", name="Jump to newest (1 new)")
    expect(jump).to_be_visible()
    assert _log(page).evaluate("(log) => log.scrollTop") == top
    jump.click()
    expect(_log(page)).to_contain_text("news")
    expect(follow).to_have_attribute("aria-pressed", "true")
    follow.click()
    expect(follow).to_have_attribute("aria-pressed", "false")


def test_what_one_reads_stays_in_place_when_old_lines_are_forgotten(page: Any, show: Any) -> None:
    show([start(2)], lines=_lines(20_000, size=1))
    page.get_by_role("tab", name="rank 0").click()
    _log(page).evaluate("(log) => { log.scrollTop -= 9000; }")
    expect(page.get_by_role("button", name="Follow")).to_have_attribute("aria-pressed", "false")
    middle = "(log) => document.elementFromPoint(log.getBoundingClientRect().x + 60, log.getBoundingClientRect().y + 100).textContent"
    page.wait_for_function("document.querySelectorAll('.anb-output .anb-line').length > 10")
    before = _log(page).evaluate(middle)
    give(page, seq=3, lines=[[0, 0, f"more {i}", 1.0, 0] for i in range(100)])
    expect(page.locator(".anb-jump").locator("visible=true")).to_contain_text("100 new")
    assert _log(page).evaluate(middle) == before


def test_a_selection_lives_through_new_lines(page: Any, show: Any) -> None:
    show([start(1)], lines=_lines(100, size=1))
    expect(_log(page)).to_contain_text("line 99")
    _log(page).locator(".anb-line", has_text="line 97").evaluate("(row) => getSelection().selectAllChildren(row)")
    give(page, seq=3, lines=[[0, 0, f"more {i}", 1.0, 0] for i in range(200)])
    expect(page.get_by_role("button", name="Jump to newest")).to_be_visible()
    assert page.evaluate("getSelection().toString()").strip() == "line 97"
    page.get_by_role("button", name="Jump to newest").click()
    expect(_log(page)).to_contain_text("more 199")


def test_only_the_lines_in_sight_are_in_the_page(page: Any, show: Any) -> None:
    show([start(8)], lines=_lines(50_000, size=8))
    expect(_log(page)).to_contain_text("line 49999")
    assert page.locator(".anb-output .anb-line").count() < 40
    page.get_by_role("button", name="Side by side").click()
    expect(page.locator(".anb-side-box").first).to_contain_text("line")
    assert page.locator(".anb-output .anb-line").count() < 200
    assert page.evaluate("document.querySelectorAll('.anb *').length") < 2000


def test_a_very_long_line_neither_breaks_the_panel_nor_its_neighbours(page: Any, show: Any) -> None:
    show([start(1)], lines=[[0, 0, "x" * 200_000, 1.0, 0], [0, 0, "after", 1.0, 0]])
    expect(_log(page)).to_contain_text("190,000 more characters in the file")
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
    heights = _log(page).locator(".anb-line").evaluate_all("(rows) => rows.map((row) => row.offsetHeight)")
    assert heights == [18, 18]


def test_long_lines_can_be_broken(page: Any, show: Any) -> None:
    lines = [
        [0, 0, "." * 1000, 1.0, 0],
        [0, 0, "\x1b[31mcoloured\x1b[0m", 1.0, 0],
        [0, 0, "漢" * 200 + "\tend", 1.0, 0],
    ]
    show([start(1)], lines=lines)
    page.get_by_role("button", name="Wrap").click()
    rows = _log(page).locator(".anb-line")
    expect(rows).to_have_count(3)
    assert _log(page).evaluate("(log) => log.scrollWidth <= log.clientWidth")
    # each row has room for all of its text, and the next one begins below it
    places = rows.evaluate_all(
        "(rows) => rows.map((row) => [row.offsetTop, row.offsetHeight, row.querySelector('.anb-text').scrollHeight])"
    )
    assert all(below[0] == top + room for (top, room, _), below in pairwise(places))
    assert all(room >= needed for _, room, needed in places)
    assert [needed > 18 for _, _, needed in places] == [True, False, True]
    give(page, seq=3, lines=[[0, 0, f"{i} {'y' * 400}", 1.0, 0] for i in range(500)])
    expect(_log(page)).to_contain_text("499 yyy")
    assert _log(page).evaluate("(log) => log.scrollTop + log.clientHeight >= log.scrollHeight - 1")
    page.get_by_role("button", name="Wrap").click()
    expect(rows.last).to_have_css("height", "18px")


def test_of_many_open_lines_the_ranks_are_named_that_are_left_out(page: Any, show: Any) -> None:
    show([start(12)], lines=[[rank, 0, f"bar of {rank}", 1.0, 1] for rank in range(12) if rank != 9])
    expect(_log(page).locator(".anb-line").last).to_have_text(
        "… the open lines of ranks 8, 10–11 are in their own output\n"
    )
    expect(_log(page).locator(".anb-line")).to_have_count(9)


def test_the_output_is_copied_as_plain_text_and_times_can_be_shown(page: Any, show: Any) -> None:
    show([start(2)])
    page.evaluate(
        "() => Object.defineProperty(navigator, 'clipboard', { value: { writeText: async (text) => { window.copied = text; } } })"
    )
    give(page, seq=2, lines=[[0, 0, "\x1b[31mred\x1b[0m", 1.0, 0], [1, 0, "plain", STARTED + 0.25, 0]])
    expect(_log(page)).to_contain_text("plain")
    page.locator(".anb-output").get_by_role("button", name="Copy", exact=True).click()
    assert page.evaluate("window.copied") == "[0] red\n[1] plain"
    page.get_by_role("button", name="Times").click()
    times = [re.compile(rf"^\d\d:\d\d:\d\d\.{part}$") for part in ("000", "250")]
    expect(_log(page).locator(".anb-time")).to_have_text(times)


def test_the_whole_file_of_a_rank_is_saved(page: Any, show: Any) -> None:
    show(running(2))
    expect(page.get_by_role("button", name="Whole file")).to_be_hidden()  # of all ranks together there is none
    page.get_by_role("tab", name="rank 1").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Whole file").click()
        assert sent(page, "log") == [{"do": "log", "rank": 1}]
        page.evaluate("() => giveFile({ file: { name: 'rank_1.log' } }, 'every line\\n')")
    assert download.value.suggested_filename == "rank_1.log"
    assert Path(download.value.path()).read_text() == "every line\n"


# ----------------------------------------------------------------------------------------------------------------- charts


def _chart(page: Any, name: str) -> Any:
    return page.get_by_role("group", name=f"metric {name}", exact=True)


def _points(*values: Any) -> list[list[Any]]:
    return [[10 * i, value, 0] for i, value in enumerate(values)]


def test_only_the_charts_in_sight_are_drawn(page: Any, show: Any) -> None:
    show([start(1)], metrics=[[f"metric {number:03}", 0, _points(1, number)] for number in range(200)])
    last = _chart(page, "metric 199")
    expect(last).to_contain_text("199")
    assert 0 < page.locator(".anb-plot canvas").count() < 100
    last.scroll_into_view_if_needed()
    expect(last.locator("canvas")).to_have_count(1)


def _tip(page: Any, name: str, share: float) -> list[str]:
    """What a chart shows where one points at it."""
    box = _chart(page, name).locator(".anb-plot").bounding_box()
    page.mouse.move(box["x"] + 24 + share * (box["width"] - 37), box["y"] + 40)
    tip = _chart(page, name).locator(".anb-tip")
    expect(tip).to_be_visible()
    return tip.inner_text().split("\n")


def _pixels(page: Any, name: str, condition: str) -> int:
    """Of how many pixels of a chart something is so: of their red, green, blue and opacity."""
    script = f"""(canvas) => {{ const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data; let count = 0;
        for (let i = 0; i < data.length; i += 4) {{ const [r, g, b, a] = data.subarray(i, i + 4); if ({condition}) count++; }} return count; }}"""
    return _chart(page, name).locator("canvas").evaluate(script)


# of a line's colour, and not of the axes'
INK = "a && Math.max(r, g, b) - Math.min(r, g, b) > 60"


def test_pointing_at_a_chart_shows_every_ranks_value_at_the_nearest_step(page: Any, show: Any) -> None:
    show(
        [start(2)],
        metrics=[["loss", 0, _points(3, 2, 1)], ["loss", 1, _points(3.5, 2.5, 1.5)], ["lr", 0, _points(7, 8, 9)]],
    )
    expect(_chart(page, "loss").locator(".anb-chart-value")).to_have_text("1.250")
    assert _tip(page, "loss", 0.52) == ["step 10", "0", "2", "1", "2.500"]
    # every chart stands at the same step
    expect(_chart(page, "lr").locator(".anb-chart-value")).to_have_text("8")
    expect(_chart(page, "lr").locator(".u-cursor-x")).to_be_visible()
    page.mouse.move(5, 5)
    expect(_chart(page, "loss").locator(".anb-tip")).to_be_hidden()
    expect(_chart(page, "lr").locator(".anb-chart-value")).to_have_text("9")


def test_a_band_shows_mean_and_range(page: Any, show: Any) -> None:
    show([start(3)], metrics=[["loss", rank, _points(rank, rank + 1, rank + 2)] for rank in range(3)])
    assert _tip(page, "loss", 0.5) == ["step 10", "mean", "2", "min · rank 0", "1", "max · rank 2", "3"]
    page.mouse.move(5, 5)
    # a line for each rank, where that is chosen
    page.get_by_role("button", name="Band").click()
    assert _tip(page, "loss", 0.5) == ["step 10", "0", "1", "1", "2", "2", "3"]


def test_dragging_over_a_chart_zooms_all_charts_and_a_double_click_ends_it(page: Any, show: Any) -> None:
    show([start(1)], metrics=[[name, 0, _points(*range(101))] for name in ("loss", "lr")])
    plot = _chart(page, "loss").locator(".anb-plot")
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + 40, steps=3)
    page.mouse.up()
    expect(page.get_by_role("button", name="Show all")).to_be_visible()
    zoom = "() => [...document.querySelectorAll('.anb-plot')].map(({anbChart}) => [anbChart.range.from, anbChart.range.to].map(Math.round))"
    first, second = page.evaluate(zoom)
    assert first == second
    assert 400 < first[0] < 520 < 700 < first[1] < 850
    plot.dblclick()
    expect(page.get_by_role("button", name="Show all")).to_be_hidden()
    plot.press("End")
    plot.press("+")
    assert page.evaluate(zoom)[0] == [750, 1250]
    plot.press("0")
    assert page.evaluate(zoom)[0] == [0, 1000]


def test_charts_are_drawn_over_steps_time_or_epochs(page: Any, show: Any) -> None:
    loss = [[10 * i, float(i), STARTED + 2 * i] for i in range(11)]
    show([start(1)], metrics=[["loss", 0, loss]])
    axis = page.get_by_label("axis of the charts")
    assert axis.locator("option").all_inner_texts() == ["step", "time"]
    axis.select_option("time")
    assert _tip(page, "loss", 1) == ["after 20 s", "0", "10"]
    # epochs are where the time says, whatever a metric counts as steps
    give(page, seq=3, metrics=[["epoch", 0, [[3 * i, i / 4, STARTED + 2 * i] for i in range(11)]]])
    axis.select_option("epoch")
    assert _tip(page, "loss", 1) == ["epoch 2.500", "0", "10"]
    # it is an axis, and no chart
    expect(page.locator(".anb-chart")).to_have_count(1)


def test_the_marks_of_an_axis_never_repeat(page: Any, show: Any) -> None:
    for values in (
        [1234.5, 1234.6, 1234.7],
        [1_000_000, 1_000_050],
        [0.100001, 0.100002],
        [1e-9, 1.0001e-9],
        [1e20, 1e20 + 1e5],
    ):
        marks = page.evaluate("(values) => panel.marks(values)", values)
        assert len({*marks}) == len(values), marks
    assert page.evaluate("panel.marks([0, 0.5, 1, 1500])") == ["0", "0.5", "1", "1500"]
    # values that differ by rounding alone have a chart, too
    show([start(1)], metrics=[["accuracy", 0, _points(1.0, 1.0 + 2**-52)]])
    expect(page.locator(".anb-plot canvas")).to_have_count(1)


def test_lines_that_coincide_keep_their_colours(page: Any, show: Any) -> None:
    show([start(2)], metrics=[["loss", rank, _points(*[i % 5 for i in range(40)])] for rank in range(2)])
    expect(_chart(page, "loss").locator(".anb-chart-value")).to_have_text("4")
    found = [_pixels(page, "loss", f"a > 250 && '{colour}' == [r, g, b]") for colour in ("26,111,196", "180,80,11")]
    assert min(found) > 50, found


def test_smoothing_draws_averages_over_the_faint_values(page: Any, show: Any) -> None:
    show([start(1)], metrics=[["loss", 0, _points(*[100 * (i % 2) for i in range(40)])]])
    opaque = "a > 128 && b - r > 60"
    values = _pixels(page, "loss", opaque)
    page.get_by_label("smoothing").fill("0.9")
    assert 0 < _pixels(page, "loss", opaque) < values / 2
    assert _pixels(page, "loss", INK) > values / 2
    averages = page.evaluate("() => panel.smoothed([0, 100, 0, NaN].map((mean) => ({ mean, points: 1 })), 0.5)")
    # 0, 50 / 0.75, 25 / 0.875, by hand; what is no number changes nothing
    assert averages[:3] == pytest.approx([0, 200 / 3, 200 / 7])
    assert averages[3] == averages[2]


def test_charts_stand_in_groups_by_prefix_that_fold_and_can_be_filtered(page: Any, show: Any) -> None:
    names = ["speed/step_time_s", "val/loss", "loss", "val/acc"]
    show([start(1)], metrics=[[name, 0, _points(1, 2)] for name in names])
    shown = page.locator(".anb-chart:visible .anb-chart-name")
    expect(shown).to_have_text(["loss", "loss", "acc", "step_time_s"])
    page.get_by_role("button", name="val", exact=True).click()
    expect(shown).to_have_text(["loss", "step_time_s"])
    page.get_by_role("button", name="val", exact=True).click()
    page.get_by_label("filter charts").fill("LOSS")
    expect(shown).to_have_text(["loss", "loss"])
    expect(page.get_by_role("button", name="speed", exact=True)).to_be_hidden()
    # what comes later is filtered as well
    give(page, seq=3, metrics=[["train/accuracy", 0, _points(1)], ["train/loss", 0, _points(1)]])
    expect(shown).to_have_text(["loss", "loss", "loss"])
    expect(page.get_by_role("button", name="train", exact=True)).to_be_visible()


def test_values_leave_as_csv_as_code_and_as_a_picture(page: Any, show: Any) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    show([start(2)], metrics=[['a "b", c', 1, [[3, 0.5, STARTED + 1], [4, "nan", STARTED + 2]]]])
    with page.expect_download() as csv:
        page.get_by_role("button", name="CSV").click()
    assert csv.value.suggested_filename == "train.csv"
    assert Path(csv.value.path()).read_text().splitlines() == [
        "name,rank,step,time,value",
        f'"a ""b"", c",1,3,{STARTED + 1:.0f},0.5',
        f'"a ""b"", c",1,4,{STARTED + 2:.0f},NaN',
    ]
    page.get_by_role("button", name="Copy as DataFrame").click()
    code = page.evaluate("() => navigator.clipboard.readText()")
    assert 'pd.read_json("/home/me/.accelerate_nb/runs/train-7/metrics.jsonl", lines=True)' in code
    page.get_by_role("button", name='a "b", c: large').click()
    with page.expect_download() as picture:
        page.get_by_role("button", name='a "b", c: save as PNG').click()
    assert picture.value.suggested_filename == "a_b_c.png"
    made = Path(picture.value.path()).read_bytes()
    assert made.startswith(b"\x89PNG")
    # room for its title, the axis' name and a legend
    canvas = _chart(page, 'a "b", c').locator("canvas").evaluate("(canvas) => [canvas.width, canvas.height]")
    assert struct.unpack(">II", made[16:24]) == (canvas[0], canvas[1] + 62)


def test_a_logarithmic_scale_leaves_out_what_has_no_logarithm(page: Any, show: Any) -> None:
    show([start(1)], metrics=[["loss", 0, _points(100, 1, 0, -5, 0.01)], ["bad", 0, _points(-1, -2)]])
    page.get_by_role("button", name="loss: logarithmic scale").click()
    expect(_chart(page, "loss").locator(".anb-chart-note")).to_have_text("⚠ 2 ≤ 0 not shown")
    assert _pixels(page, "loss", INK) > 50
    page.get_by_role("button", name="bad: logarithmic scale").click()
    assert _pixels(page, "bad", INK) == 0


def test_points_beside_a_gap_are_drawn_and_a_chart_without_a_number_is_hidden(page: Any, show: Any) -> None:
    show([start(1)], metrics=[["split", 0, _points(3, "nan", 1)], ["void", 0, _points("nan")]])
    assert _pixels(page, "split", INK) > 20
    expect(_chart(page, "void").locator(".anb-plot")).to_be_hidden()


def test_a_number_over_ranks_names_its_kind_and_is_of_one_step(page: Any, show: Any) -> None:
    loss = [["loss", 0, [[0, 1.0], [1, 2.0], [2, 9.0]]], ["loss", 1, [[0, 2.0], [1, 4.0]]]]
    rates = [[name, rank, [[0, 50.0], [1, 100.0]]] for name in ("samples_per_second", "it/s") for rank in range(2)]
    speed = [
        ["speed/samples_per_s", rank, [[s + rank, 10.0 * (s + 1), s + rank / 2] for s in range(3)]] for rank in range(2)
    ]
    show([start(2)], metrics=[*loss, *rates, *speed])
    heads = page.locator(".anb-chart-head")
    expect(heads.nth(0)).to_contain_text("3mean of 2")
    for rate in (1, 2):
        expect(heads.nth(rate)).to_contain_text("100mean of 2")
    # only what this package counts on each rank adds up, and its axis has the sum
    expect(heads.nth(3)).to_contain_text("50sum of 2")
    expect(page.locator(".anb-plot").nth(3)).to_have_attribute(
        "aria-label", re.compile(r"min 20\.?0*, max 50\.?0*, last 50\.?0* \(sum of 2 ranks\)")
    )
    page.get_by_role("button", name="Table").click()
    rows = page.get_by_role("table", name="metrics").get_by_role("row")
    assert rows.nth(-1).get_by_role("cell").all_inner_texts()[:4] == ["sum of 2", "20", "50", "50"]
    assert rows.nth(1).get_by_role("cell").all_inner_texts() == ["0", "1", "9", "9", "2", "3"]
    assert [rows.nth(i).get_by_role("cell").all_inner_texts()[:4] for i in (4, 5, 6)] == [
        ["0", "50", "100", "100"],
        ["1", "50", "100", "100"],
        ["mean of 2", "50", "100", "100"],
    ]


@pytest.mark.parametrize("width", [500, 1400])
def test_the_kind_of_a_number_is_never_left_out_for_room(page: Any, show: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    long = "a_very_long_name_of_a_metric_of_the_validation_per_second"
    names = ["speed/samples_per_s", long, *(f"m{i}" for i in range(5))]
    points = [[0, 0.123456, 0], [1, 12345.678, 1]]
    show([start(2)], metrics=[[name, rank, points] for name in names for rank in range(2)])
    expect(page.locator(".anb-chart-how")).to_have_count(7)
    for kind in page.locator(".anb-chart-how").all():
        expect(kind).to_have_text(re.compile("^(sum|mean) of 2$"))
        assert kind.evaluate("(kind) => kind.scrollWidth <= kind.clientWidth + 1 && kind.clientWidth > 40")


def test_a_metric_of_one_point_is_a_number_until_it_has_a_course(page: Any, show: Any) -> None:
    names = ["train/loss", "train/train_runtime", "train/total_flos", "eval/loss"]
    points = {"train/loss": [[0, 2.0, 0], [1, 1.0, 1]]}
    show([start(2)], metrics=[[name, rank, points.get(name, [[1, 4.0, 1]])] for name in names for rank in range(2)])
    groups = page.locator(".anb-chart-group")
    expect(groups.locator(".anb-group-head")).to_have_text(["train", "eval"])
    row = groups.nth(0).locator(".anb-numbers-row")
    expect(row).to_contain_text("train_runtime4mean of 2")
    expect(row).to_contain_text("total_flos4mean of 2")
    expect(page.locator(".anb-plot:visible")).to_have_count(1)
    give(page, seq=3, metrics=[["eval/loss", 0, [[2, 3.0, 2]]]])
    expect(page.locator(".anb-plot:visible")).to_have_count(2)
    expect(groups.nth(1).locator(".anb-numbers-row")).to_be_empty()


def test_where_a_metric_became_no_number_is_in_words_and_marked(page: Any, show: Any) -> None:
    broken = [[step, "nan" if step > 59 else 1.0, step] for step in range(100)]
    whole = ["norm", 1, _points(*range(100))]
    show([start(2)], metrics=[["loss", 0, broken], ["loss", 1, broken], ["norm", 0, broken], whole])
    notes = page.locator(".anb-chart-note")
    expect(notes.nth(0)).to_have_text("⚠ NaN since step 60, on all ranks")
    expect(notes.nth(1)).to_have_text("⚠ NaN since step 60, on rank 0")
    red = """(canvas) => { const x = Math.round(canvas.width * 0.9), y = Math.round(canvas.height * 0.4);
        const [r, g, b, a] = canvas.getContext("2d").getImageData(x, y, 1, 1).data; return a > 20 && r > g + 40 && r > b + 40; }"""
    expect(page.locator(".anb-plot").nth(0)).to_have_attribute(
        "aria-label", re.compile("NaN since step 60, on all ranks")
    )
    assert _chart(page, "loss").locator("canvas").evaluate(red)
    give(page, seq=3, metrics=[["loss", rank, [[100, 1.0, 100]]] for rank in range(2)])
    expect(notes.nth(0)).to_have_text("⚠ NaN until step 99, on all ranks")
    page.wait_for_function(f"() => !({red})(document.querySelector('.anb-plot canvas'))")


def test_charts_follow_the_theme(page: Any, show: Any) -> None:
    show(running(1))
    page.wait_for_function("document.querySelectorAll('.anb-chart').length === 4")
    light = _chart(page, "loss").locator("canvas").evaluate("(canvas) => canvas.toDataURL()")
    page.evaluate("theme(false)")
    expect(page.locator(".anb")).to_have_attribute("data-anb-theme", "dark")
    assert _chart(page, "loss").locator("canvas").evaluate("(canvas) => canvas.toDataURL()") != light
    # also one that names both of its colours at once
    page.evaluate("() => document.body.style.setProperty('--jp-layout-color0', 'light-dark(white, #111)')")
    for scheme in ("light", "dark"):
        page.evaluate("(scheme) => { document.body.style.colorScheme = scheme; }", scheme)
        expect(page.locator(".anb")).to_have_attribute("data-anb-theme", scheme)


# ----------------------------------------------------------------------------------------------------------------- errors


def test_the_error_leads_with_the_notebooks_own_lines(page: Any, show: Any) -> None:
    show(failed(4))
    error = page.get_by_role("region", name="The error")
    expect(error.locator(".anb-failure-head")).to_have_text("rank 1KeyError'label'")
    expect(error.locator(".anb-advice")).to_contain_text("Read batch['labels'].")
    expect(error.locator(".anb-own").locator("visible=true")).to_have_count(2)
    expect(error.locator(".anb-guilty")).to_contain_text('targets = batch["label"]')
    expect(error.get_by_text("tokenization.py")).to_be_hidden()
    error.get_by_role("button", name="2 calls in other code").click()
    expect(error.get_by_text("tokenization.py")).to_be_visible()
    expect(error.get_by_text("rank 3: waited in all_reduce")).to_be_visible()
    error.get_by_role("button", name="Whole traceback").click()
    expect(error.get_by_label("traceback")).to_contain_text("Traceback (most recent call last)")
    expect(page.locator(".anb-chip").first).to_contain_text("failed")
    # a rank that has ended has no time left
    expect(_rows(page).nth(1)).not_to_contain_text("left")


def test_a_run_whose_time_was_over_reports_where_its_ranks_waited(page: Any, show: Any) -> None:
    show(running(2))
    where = "timeout=3: the run had not ended after 3 s.\nrank 0 waits in all_reduce, at Cell In[3], line 8"
    failure = {"rank": None, "type": "HangError", "message": where, "traceback": "rank 0:\n  Cell In[3], line 8"}
    give(page, seq=3, failure=failure, state={"state": "failed", "detail": "", "ended": STARTED + 80})
    error = page.get_by_role("region", name="The error")
    expect(error.locator(".anb-failure-head")).to_have_text(f"HangError{where}")
    error.get_by_role("button", name="Every rank's stack").click()
    expect(error.get_by_label("traceback")).to_contain_text("Cell In[3], line 8")


def test_a_process_that_died_shows_its_last_words(page: Any, show: Any) -> None:
    show(running(2))
    failure = {"rank": 0, "type": "Killed", "message": "by SIGKILL", "last_lines": ["one", "\x1b[31mtwo\x1b[0m"]}
    give(page, seq=3, failure=failure)
    expect(page.get_by_label("last lines")).to_have_text("one\ntwo")


# ------------------------------------------------------------------------------------------------- several views, no kernel


ANOTHER_VIEW = "() => { const el = document.createElement('div'); document.querySelector('main').append(el); window.end = render(el); }"


def test_two_views_show_the_same_run(page: Any, show: Any) -> None:
    show(running(2))
    page.evaluate(ANOTHER_VIEW)
    expect(page.locator(".anb")).to_have_count(2)
    expect(page.locator(".anb").nth(1)).to_contain_text("326/600")
    give(page, seq=3, lines=[[0, 0, "to both", 1.0, 0]])
    expect(page.get_by_text("to both")).to_have_count(2)
    assert len({item["view"] for item in sent(page, "hello")}) == 2
    page.evaluate("end()")
    expect(page.locator(".anb")).to_have_count(1)


def test_a_view_requests_all_of_the_run_until_the_page_has_it(page: Any) -> None:
    page.evaluate("() => { start(); }")
    # a page that is loaded anew may get changes before it draws the panel
    give(page, seq=7, host=[["cpu", 48.0, 100.0, "%"]])
    page.evaluate(ANOTHER_VIEW)
    give(page, **start(2) | {"seq": 8})
    page.evaluate(ANOTHER_VIEW)
    assert [hello["seq"] for hello in sent(page, "hello")] == [0, 0, 8]


def test_a_reset_begins_anew(page: Any, show: Any) -> None:
    show(running(8))
    page.get_by_role("tab", name="rank 7").click()
    give(page, seq=6, skipped=10)
    page.evaluate(
        "(messages) => give(...messages)", [{**start(2), "seq": 9}, {"seq": 10, "lines": [[0, 0, "again", 1.0, 0]]}]
    )
    expect(_rows(page)).to_have_count(2)
    expect(page.get_by_role("tab")).to_have_count(3)
    expect(page.locator(".anb-chart")).to_have_count(0)
    expect(_log(page)).to_contain_text("again")
    expect(page.locator(".anb-notes")).to_have_text("")


def test_the_panel_of_a_run_that_is_over_takes_its_reports_place_once_the_kernel_has_sent_it(page: Any) -> None:
    page.evaluate(
        """() => {
          model.traits.place = { report: "the-report" };
          start();
          document.getElementById("here").replaceChildren(Object.assign(document.createElement("div"), { id: "the-report", textContent: "static" }));
        }"""
    )
    page.wait_for_function("model.sent.length === 2")  # that of the view, and that for the report
    # without a kernel's reply the report stays
    report = page.locator("#the-report")
    expect(report).to_be_visible()
    page.evaluate("(messages) => give(...messages)", failed(2))
    expect(report).to_be_hidden()
    panel = page.locator("#here .anb")
    expect(panel).to_have_count(1)
    expect(panel.get_by_role("region", name="The error")).to_be_visible()
    expect(_log(page)).to_contain_text("step")
    # it does so again where the notebook draws the report anew
    page.evaluate(
        """() => document.getElementById("here").replaceChildren(Object.assign(document.createElement("div"), { id: "the-report" }))"""
    )
    expect(panel).to_have_count(1)
    expect(panel.get_by_role("heading", name="train")).to_be_visible()


EVIL = '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>'


def test_nothing_that_a_worker_writes_becomes_part_of_the_page(page: Any, show: Any) -> None:
    run = start(1, name=EVIL, why=EVIL, folder=EVIL)
    run["state"]["detail"] = EVIL
    failure = {
        "rank": 0, "type": EVIL, "message": EVIL, "advice": EVIL, "frames": [[EVIL, EVIL, EVIL, True]] * 2,
        "traceback": EVIL, "last_lines": [EVIL], "others": [EVIL]
    }  # fmt: skip
    message = {
        "seq": 2, "failure": failure, "idle_warning": {"seconds": 1, "text": EVIL}, "stacks": {"text": EVIL},
        "lines": [[0, 0, EVIL, 1.0, 0], [0, 1, f"\x1b[31m{EVIL}", 1.0, 1]], "ranks": [[0, "running", EVIL, 2]],
        "progress": [[0, EVIL, 1, 2, 1.0, EVIL, 0]], "devices": [[0, EVIL, 1, 1, 1]], "host": [[EVIL, 1, 2, "B"]],
        "metrics": [[EVIL, 0, [[0, 1.0, 0]]]]
    }  # fmt: skip
    show([run, message])
    page.get_by_label("search in the output").fill("<img")
    page.get_by_role("button", name="Table").click()
    expect(page.locator(".anb-found")).to_have_text("1 match")
    assert page.locator(".anb img, .anb script").count() == 0
    assert page.evaluate("window.pwned") is None
