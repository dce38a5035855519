"""Profiles in the panel: a button that requests one, the table of each rank, the trace as a file, and what a report keeps."""

from typing import Any

import pytest

from tests.browser.page.feeds import STARTED, give, running, sent

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect


def profile(number: int, name: str, **more: Any) -> dict[str, Any]:
    operations = [[name, 1200, 0.3, 0.6, "cuda"], ["aten::add_", 40, 0.1, 0.2, "cuda"]]
    facts = {"number": number, "steps": 10, "seconds": 0.5, "problem": "", "trace": "/runs/7/trace.json.gz"}
    return {**facts, "operations": operations, **more}


def test_a_profile_is_requested_of_the_chosen_rank_shown_and_saved(page: Any, show: Any, violations: Any) -> None:
    show(running(2))
    expect(page.get_by_role("region", name="Profile")).to_be_hidden()
    page.get_by_label("ranks to profile").select_option("Rank 1")
    press = page.get_by_role("button", name="Profile 10 steps")
    press.focus()
    press.press("Enter")
    assert sent(page, "profile") == [{"do": "profile", "ranks": [1]}]
    status = page.locator(".anb-profiling")
    expect(status).to_have_text("Requested a profile…")
    give(page, seq=3, profiles=[[1, 10, None]])
    expect(status).to_have_text("Profiling rank 1: the next 10 steps…")
    press.click()
    give(page, seq=4, profile_error="one of rank 1 is under way")
    expect(status).to_have_text("one of rank 1 is under way")
    give(page, seq=5, profiles=[[1, None, profile(1, "aten::mm")]])
    expect(status).to_be_hidden()
    expect(page.locator(".anb-sr[role=status]").last).to_contain_text(
        "Profile: 10 steps, 50.0 ms a step; time on the CUDA"
    )
    table = page.get_by_role("table", name="costliest operations")
    expect(table.get_by_role("row").nth(1)).to_have_text("aten::mm1,200300 ms60.0 %")
    page.get_by_role("button", name="Trace").click()
    assert sent(page, "trace") == [{"do": "trace", "rank": 1}]
    with page.expect_download() as download:
        page.evaluate("() => giveFile({ file: { name: 'trace.json.gz' } }, 'the trace')")
    assert download.value.suggested_filename == "trace.json.gz"
    # a newer one takes its place, and another rank's can be chosen
    give(page, seq=6, profiles=[[0, None, profile(2, "aten::conv2d")], [1, None, profile(2, "aten::bmm")]])
    expect(table).to_contain_text("aten::conv2d")
    page.get_by_label("rank whose profile is shown").select_option("Rank 1")
    expect(table).to_contain_text("aten::bmm")
    for light in (True, False):
        page.evaluate("(light) => theme(light)", light)
        expect(page.locator(".anb")).to_have_attribute("data-anb-theme", "light" if light else "dark")
        for part in (".anb-profile", ".anb-ranks"):
            assert violations(page, part) == []
    # the chosen rank may be lost
    give(page, seq=7, restarts=[[1, 3, "node b was lost", 1]])
    expect(table).to_contain_text("aten::conv2d")
    give(page, seq=8, state={"state": "finished", "ended": STARTED + 75})
    expect(press).to_be_hidden()
    expect(table).to_contain_text("aten::conv2d")


def test_of_a_rank_that_was_not_profiled_the_reason_stands_in_place_of_a_table(page: Any, show: Any) -> None:
    rows = [[0, None, profile(1, "aten::mm")], [1, None, profile(1, "", operations=[], problem="no step was seen")]]
    show([*running(2), {"seq": 3, "profiles": rows}])
    section = page.get_by_role("region", name="Profile")
    expect(section).to_contain_text("aten::mm")
    page.get_by_label("rank whose profile is shown").select_option("Rank 1")
    expect(section).to_contain_text("rank 1 was not profiled: no step was seen")
    expect(section.get_by_role("table")).to_be_hidden()
