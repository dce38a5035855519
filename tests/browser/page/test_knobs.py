"""Knobs in the panel: an input for each, marks in the charts, nothing of them to press in a report."""

import re
from typing import Any

import pytest

from tests.browser.page.feeds import STARTED, give, running, sent

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

KNOBS = {"seq": 3, "knobs": [["lr", 0.001, 1e-6, 0.1], ["temperature", 1.0, None, None]]}
PIXELS = "() => { const c = document.querySelector('.anb-chart canvas'); return c.toDataURL() }"


def test_a_knob_is_set_by_keyboard_and_its_refusal_is_reported(page: Any, show: Any, violations: Any) -> None:
    show([*running(2), KNOBS])
    value = page.get_by_label("knob lr", exact=True)
    expect(value).to_have_value("0.001")
    value.fill("0.0005")
    value.press("Enter")
    assert sent(page, "knob") == [{"do": "knob", "name": "lr", "value": 0.0005}]
    hint = page.locator(".anb-knob", has_text="lr").first.locator(".anb-knob-hint")
    expect(hint).to_contain_text("changes after a step")
    give(page, seq=4, knobs=[["lr", 0.0005, 1e-6, 0.1]])
    expect(hint).to_contain_text("now 0.0005")
    expect(page.locator(".anb-sr[role=status]").last).to_have_text("lr is 0.0005 on all ranks")
    value.fill("much")
    page.get_by_role("button", name="Set knob lr").click()
    assert sent(page, "knob")[-1]["value"] == "much"
    give(page, seq=5, knob_error={"name": "lr", "text": "takes finite numbers"})
    expect(hint).to_have_text("takes finite numbers")
    expect(value).to_have_attribute("aria-invalid", "true")
    for light in (True, False):
        page.evaluate("(light) => theme(light)", light)
        expect(page.locator(".anb")).to_have_attribute("data-anb-theme", "light" if light else "dark")
        assert violations(page, ".anb-knobs") == []
    give(page, seq=6, state={"state": "finished", "ended": STARTED + 75})
    expect(page.get_by_role("group", name="Knobs")).to_be_hidden()


def test_a_change_is_marked_in_the_charts(page: Any, show: Any) -> None:
    show(running(2))
    plot = page.locator(".anb-plot").first
    page.wait_for_function("document.querySelector('.anb-chart canvas')?.width > 0")
    before = page.evaluate(PIXELS)
    give(page, seq=3, knob_changes=[["lr", 0.0005, STARTED + 30]])
    expect(plot).to_have_attribute("aria-label", re.compile("Knob lr changed to 0.0005"))
    page.wait_for_function(f"(before) => ({PIXELS})() !== before", arg=before)
