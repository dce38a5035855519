"""How runs end in a notebook that a person looks at."""

import re
from collections.abc import Callable
from itertools import pairwise

import pytest

from tests.browser.cells import RUN, TRAIN
from tests.browser.jlab import TIMEOUT, Notebook

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

# on a busy machine a page takes its time to load
pytestmark = pytest.mark.timeout(480)

FAILS = """
def fails():
    train(20)
    raise KeyError("label")
"""
# every height that the second cell's output has, and whether the panel is in it
WATCH_HEIGHT = """
() => {
  const found = (window.heights_ = []);
  const step = () => {
    const area = document.querySelectorAll(".jp-Notebook .jp-CodeCell")[1]?.querySelector(".jp-Cell-outputArea");
    const now = [Math.round(area?.getBoundingClientRect().height ?? 0), Boolean(area?.querySelector(".anb"))];
    if (String(found.at(-1)) !== String(now)) found.push(now);
    requestAnimationFrame(step);
  };
  step();
}
"""


@pytest.mark.parametrize(
    ("cell", "end"),
    [
        ("print('it', notebook_launcher(train, (20,), num_processes=2, cpu=True))", "finished"),
        ("notebook_launcher(fails, num_processes=2, cpu=True)", "failed"),
        (RUN, "stopped"),
    ],
)
def test_the_end_of_a_run_does_not_make_the_page_jump(given: Callable[..., Notebook], cell: str, end: str) -> None:
    notebook = given(TRAIN + FAILS, cell)
    notebook.page.evaluate(WATCH_HEIGHT)
    notebook.start()
    panel = notebook.page.locator(".anb")
    if end == "stopped":
        # until a log is full, that of one rank is shorter than that of all
        full = re.compile(r"steps [3-9]\d")
        expect(panel.get_by_role("progressbar").first).to_have_attribute("aria-valuetext", full, timeout=TIMEOUT * 1000)
        panel.get_by_role("button", name="loss: large").click()
        panel.get_by_label("smoothing").fill("0.5")
        panel.get_by_role("tab", name="rank 1").click()
        panel.get_by_role("button", name="Stop").click()
    notebook.wait()
    expect(panel.locator(".anb-title .anb-chip")).to_contain_text(end)
    # what a person has chosen survives
    expect(panel.locator(".anb-large")).to_have_count(int(end == "stopped"))
    expect(panel.get_by_label("smoothing")).to_have_value("0.5" if end == "stopped" else "0")
    # the report is in the document; its script, which draws the panel elsewhere, has had its time
    notebook.page.wait_for_function("() => document.querySelector('[id^=accelerate-nb-]')?.dataset.mounted === 'true'")
    notebook.page.wait_for_timeout(1000)
    expect(panel).to_have_count(1)
    heights = notebook.page.evaluate("window.heights_")
    since = next(number for number, (_, is_panel) in enumerate(heights) if is_panel)
    assert all(is_panel for _, is_panel in heights[since:]), heights
    shown = [height for height, _ in heights[since:]]
    # it grows, with the panel's parts and with what the cell prints, and hardly ever back
    assert all(later >= earlier - 40 for earlier, later in pairwise(shown)), heights
