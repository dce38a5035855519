"""A run in a notebook that a person looks at: what is seen while its cell is busy, and what the buttons do."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.cells import ALIVE, RUN, TRAIN
from tests.browser.jlab import Notebook, Server
from tests.kernelspecs import INSTALLED

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

# on a busy machine a page takes its time to load
pytestmark = pytest.mark.timeout(480)

MOVING = re.compile(r"steps [1-9][\d,]*/100,000")


def moves(panel: Any, rank: int = 0) -> None:
    """Wait until a rank's bar has moved on."""
    bar = panel.get_by_role("progressbar", name=f"rank {rank} progress")
    expect(bar).to_have_attribute("aria-valuetext", MOVING)
    expect(bar).not_to_have_attribute("aria-valuetext", bar.get_attribute("aria-valuetext"))


def test_the_panel_follows_the_theme_and_is_walked_by_keyboard_and_the_notebook_stays_as_it_is(
    given: Callable[..., Notebook],
) -> None:
    notebook = given(TRAIN, RUN)
    notebook.start()
    page, panel = notebook.page, notebook.page.locator(".anb")
    moves(panel)
    for theme in ("dark", "light"):
        notebook.theme(f"JupyterLab {theme.title()}")
        expect(panel).to_have_attribute("data-anb-theme", theme)
    cells = page.locator(".jp-Notebook .jp-Cell").count()
    panel.get_by_role("button", name="Stacks", exact=True).first.focus()
    page.keyboard.press("Tab")
    expect(panel.get_by_role("button", name="Stop")).to_be_focused()
    # in a notebook these insert, cut and delete cells
    for key in ("b", "a", "x", "d", "d"):
        page.keyboard.press(key)
    expect(panel.get_by_role("button", name="Stop")).to_be_focused()
    assert page.locator(".jp-Notebook .jp-Cell").count() == cells
    page.keyboard.press("Enter")
    notebook.wait()
    assert re.search(r"it stopped after \d+ steps", notebook.output(1))


def stops_at_a_click(notebook: Notebook) -> None:
    notebook.start()
    panel = notebook.page.locator(".anb")
    moves(panel)
    panel.get_by_role("button", name="Stacks", exact=True).first.click()
    expect(panel.get_by_role("region", name="Stacks")).to_contain_text("train")
    panel.get_by_role("button", name="Stop").click()
    notebook.wait()
    assert re.search(r"it stopped after \d+ steps", notebook.output(1))
    assert "the kernel is alive" in notebook.output(2)


def test_stacks_and_stop_work_while_the_cell_is_busy(given: Callable[..., Notebook]) -> None:
    stops_at_a_click(given(TRAIN, RUN, ALIVE))


# one of each kind of kernel: what differs between versions is tested without a browser, in tests/kernel/test_panel.py
@pytest.mark.parametrize(
    ("ipykernel", "comms"), [(INSTALLED, "disabled"), pytest.param("6.29.5", "perCommTarget", marks=pytest.mark.slow)]
)
def test_they_work_with_other_kernels_and_settings(
    lab: Server, opened: Callable[..., Notebook], ipykernel: str, comms: str
) -> None:
    kernel = lab.kernel(ipykernel)
    # clicks go to a thread of the kernel's own ("perCommTarget"), or to the busy one ("disabled")
    with lab.setting("@jupyterlab/apputils-extension/kernels-settings", commsOverSubshells=comms):
        stops_at_a_click(opened(lab, TRAIN, RUN, ALIVE, kernel=kernel))


def test_notebook_7_shows_and_stops_a_run(notebook7: Server, opened: Callable[..., Notebook]) -> None:
    stops_at_a_click(opened(notebook7, TRAIN, RUN, ALIVE))
