"""A detached run in JupyterLab: its kernel is restarted from the menu, and another notebook shows it live and stops it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.cells import TRAIN
from tests.browser.jlab import Notebook, Server, opened_in
from tests.browser.test_kernel_ends import restart
from tests.browser.test_running import moves

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

pytestmark = pytest.mark.timeout(480)


def test_another_notebook_finds_the_run_whose_kernel_was_restarted_and_stops_it(
    lab: Server, window: Any, opened: Callable[..., Notebook]
) -> None:
    first = opened(lab, TRAIN, "run = launch(train, num_processes=2, cpu=True, detach=True)")
    first.run()
    panel = first.page.locator(".anb")
    moves(panel)
    restart(first)
    expect(panel.get_by_role("note")).to_contain_text("this run goes on without it")
    expect(panel.get_by_role("note")).to_contain_text("accelerate_nb.attach(")
    with opened_in(
        window, lab, "second.ipynb", ["import accelerate_nb\nrun = accelerate_nb.attach()", "run"]
    ) as second:
        second.run_cell(0)
        other = second.page.locator(".anb").first
        moves(other)
        other.get_by_role("button", name="Stop", exact=True).click()
        expect(other.locator(".anb-title .anb-chip")).to_have_text("■stopped")
        # the table of runs opens it too, from its folder
        second.give("accelerate_nb.runs()").run()
        row = second.cell(0).get_by_role("button", name="train").first
        row.press("Enter")
        expect(second.cell(0).locator(".anb-title .anb-chip")).to_have_text("■stopped")
        assert [output.output_type for output in second.save().cells[0].outputs] == ["execute_result", "display_data"]
        row.press("Enter")
        expect(second.page.locator(".anb")).to_have_count(0)
