"""How runs end in a notebook that a person looks at, and what is left of them in its file."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

import pytest

from tests.browser.cells import ALIVE, RUN, TRAIN
from tests.browser.jlab import Notebook

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

# on a busy machine a page takes its time to load
pytestmark = pytest.mark.timeout(480)

FLOOD = """
from accelerate_nb import notebook_launcher
def flood():
    for number in range(25_000):
        print(f"line {number} of a rank that says a lot, and then some more of it")
    return "said all"
"""
# The longest time without a frame is what a person feels; one second of idling goes before.
WATCH_FRAMES = """
() => {
  const found = (window.frames_ = { longest: 0, count: 0, began: performance.now() });
  let last = performance.now();
  const step = (now) => {
    found.longest = Math.max(found.longest, now - last);
    found.count += 1;
    last = now;
    requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
}
"""


def test_a_flood_of_lines_leaves_the_page_alive(given: Callable[..., Notebook]) -> None:
    notebook = given(FLOOD, "print(notebook_launcher(flood, num_processes=4, cpu=True))")
    notebook.page.evaluate(WATCH_FRAMES)
    notebook.run()
    panel = notebook.page.locator(".anb").first
    expect(panel.locator("[title*='100,000 lines']")).to_have_count(1)
    frames = notebook.page.evaluate("() => ({ ...window.frames_, ms: performance.now() - window.frames_.began })")
    nodes = notebook.page.evaluate("() => document.querySelectorAll('.jp-OutputArea *').length")
    print(
        f"100,000 lines: longest time without a frame {frames['longest']:.0f} ms, "
        f"{1000 * frames['count'] / frames['ms']:.0f} frames a second, {nodes} elements"
    )
    assert nodes < 20_000
    assert "said all" in notebook.output(1)


def test_an_interrupt_ends_the_run_and_not_the_kernel(given: Callable[..., Notebook]) -> None:
    notebook = given(TRAIN, RUN)
    notebook.start()
    bar = notebook.page.locator(".anb").get_by_role("progressbar").first
    expect(bar).to_have_attribute("aria-valuetext", re.compile(r"steps [1-9]"))
    notebook.command("notebook:interrupt-kernel")
    notebook.wait()
    assert "KeyboardInterrupt" in notebook.output(1)
    expect(notebook.cell(1)).to_contain_text("stopped")


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
        expect(panel.get_by_role("progressbar").first).to_have_attribute("aria-valuetext", re.compile(r"steps [1-9]"))
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


def test_a_run_in_the_background_goes_on_while_other_cells_run(given: Callable[..., Notebook]) -> None:
    notebook = given(TRAIN, "run = launch(train, num_processes=2, cpu=True)", ALIVE)
    notebook.run()
    assert "the kernel is alive" in notebook.output(2)
    panel = notebook.page.locator(".anb").first
    bar = panel.get_by_role("progressbar").first
    expect(bar).to_have_attribute("aria-valuetext", re.compile(r"steps [1-9]"))
    expect(bar).not_to_have_attribute("aria-valuetext", bar.get_attribute("aria-valuetext"))
    panel.get_by_role("button", name="Stop").click()
    expect(notebook.cell(1)).to_contain_text("stopped")
