"""A detached run in JupyterLab: its kernel is restarted from the menu, and another notebook shows it live and stops it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.browser.cells import TRAIN
from tests.browser.jlab import Notebook, Server, opened_in
from tests.browser.test_running import moves

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

pytestmark = pytest.mark.timeout(480)


def test_another_notebook_finds_the_run_whose_kernel_was_restarted_and_stops_it(
    lab: Server, window: Any, opened: Callable[..., Notebook], tmp_path: Path
) -> None:
    # the runs of other tests with the same server are elsewhere
    folder = f"%env ACCELERATE_NB_FOLDER={tmp_path}\n"
    first = opened(lab, f"{folder}{TRAIN}", "run = launch(train, num_processes=2, cpu=True, detach=True)")
    first.run()
    panel = first.page.locator(".anb")
    moves(panel)
    first.restart()
    expect(panel.get_by_role("note")).to_contain_text("this run goes on without it")
    expect(panel.get_by_role("note")).to_contain_text("accelerate_nb.attach(")
    attaches = f"{folder}import accelerate_nb\nrun = accelerate_nb.attach()"
    with opened_in(window, lab, "second.ipynb", [attaches, "run"]) as second:
        second.run_cell(0)
        other = second.page.locator(".anb").first
        moves(other)
        other.get_by_role("button", name="Stop", exact=True).click()
        expect(other.locator(".anb-title .anb-chip")).to_have_text("■stopped")
        # the table of runs opens it too, from its folder, between its row and the next
        second.give(
            "from accelerate_nb import launch\n"
            "launch(print, num_processes=1, cpu=True, panel=False, name='later', tags='a,b').wait()\n"
            "launch(print, num_processes=1, cpu=True, panel=False, name='first ' + 'x' * 90).wait()\n"
            "accelerate_nb.runs()"
        ).run()
        cell = second.cell(0)
        row = cell.get_by_role("button", name="later")
        row.press("Enter")
        title = cell.locator(".anb-title")
        expect(title.locator(".anb-chip")).to_have_text("✓finished")
        expect(title.locator(".anb-name")).to_have_text("later")
        expect(title.locator(".anb-tags")).to_have_text("a · b")
        tops = [cell.get_by_role("button", name=name).bounding_box()["y"] for name in ("first", "later", "train")]
        assert tops[0] < tops[1] < title.bounding_box()["y"] < tops[2]
        # one line a row, each column as wide in both parts
        rows = cell.locator("tr[data-run]")
        heights = "rows => rows.map(row => Math.round(row.getBoundingClientRect().height))"
        assert len(set(rows.evaluate_all(heights))) == 1
        # measured at once: a bar to scroll with comes when the page has grown
        places = "cells => cells.map(cell => cell.getBoundingClientRect()).map(({ x, width }) => `${x} ${width}`)"
        boxes = cell.locator("td[data-name]").evaluate_all(places)
        assert len(boxes) == 3
        assert len(set(boxes)) == 1
        outputs = [output.output_type for output in second.save().cells[0].outputs]
        assert outputs == ["execute_result", "display_data", "display_data"]
        expect(row).to_be_focused()
        row.press("Enter")
        expect(second.page.locator(".anb")).to_have_count(0)
        expect(rows).to_have_count(3)
