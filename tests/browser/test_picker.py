"""The picker's form in a notebook: it is filled in, copied from and tried, and its value launches a run."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.jlab import Notebook

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

pytestmark = pytest.mark.slow

PICK = """
import os
os.environ["HF_HOME"] = {home!r}
import accelerate_nb
picker = accelerate_nb.config_picker(cpu=True)
picker
"""
LAUNCH = """
def train():
    return os.environ["WORLD_SIZE"], os.environ["ACCELERATE_MIXED_PRECISION"]
print(accelerate_nb.notebook_launcher(train, config=picker.value))
"""


@pytest.fixture
def picking(given: Callable[..., Notebook], tmp_path: Path) -> Iterator[Notebook]:
    """A notebook whose first cell shows the form; the second has not run."""
    notebook = given(PICK.format(home=str(tmp_path)), LAUNCH)
    notebook.run_cell(0)
    expect(form(notebook).get_by_label("num_processes")).to_be_visible()
    wide = notebook.page.viewport_size
    yield notebook
    notebook.page.set_viewport_size(wide)


def form(notebook: Notebook) -> Any:
    return notebook.page.locator(".acc-picker")


def text(notebook: Notebook, name: str) -> Any:
    """One of the texts to copy."""
    return form(notebook).get_by_role("textbox", name=name, exact=True)


def fill(notebook: Notebook) -> None:
    form(notebook).get_by_label("num_processes").fill("2")
    form(notebook).get_by_label("mixed_precision").select_option("bf16")
    expect(text(notebook, "Cell")).to_have_value(
        'notebook_launcher(train, num_processes=2, cpu=True, mixed_precision="bf16")'
    )


def run_the_second_cell(notebook: Notebook) -> None:
    notebook.run_cell(1)
    expect(notebook.cell(1)).to_contain_text("('2', 'bf16')")


def test_a_form_that_is_filled_in_is_copied_from_and_launches_a_run(picking: Notebook) -> None:
    fill(picking)
    expect(text(picking, "Command line")).to_have_value(
        "accelerate-nb launch --num-processes 2 --cpu --mixed-precision bf16 train.py"
    )
    picking.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    form(picking).get_by_role("button", name="Copy: Configuration file").click()
    expect(form(picking).get_by_text("Copied", exact=True)).to_be_visible()
    assert picking.page.evaluate("navigator.clipboard.readText()") == text(picking, "Configuration file").input_value()
    # a page that is not served securely has no clipboard of its own
    picking.page.evaluate("Object.defineProperty(window, 'isSecureContext', {value: false})")
    form(picking).get_by_role("button", name="Copy: Command line").click()
    expect(form(picking).get_by_role("button", name="Copy: Command line")).to_have_text("Copied")
    assert picking.page.evaluate("navigator.clipboard.readText()") == text(picking, "Command line").input_value()
    run_the_second_cell(picking)
    form(picking).get_by_role("button", name="Insert as cell").click()
    expect(form(picking).get_by_text("Inserted below")).to_be_visible()
    expect(picking.cell(1)).to_contain_text("from accelerate_nb import notebook_launcher")
    expect(picking.cell(1)).to_contain_text('mixed_precision="bf16")')


def test_a_wrong_value_is_reported_while_one_types_and_all_keys_go_to_the_form(picking: Notebook) -> None:
    page, cells = picking.page, picking.page.locator(".jp-Cell").count()
    field = form(picking).get_by_label("num_processes")
    field.press_sequentially("two")
    wrong = form(picking).get_by_role("alert")
    expect(wrong).to_contain_text("num_processes was given as 'two', but num_processes should be a whole number")
    expect(form(picking).get_by_role("button", name="Test these settings")).to_be_disabled()
    expect(text(picking, "Cell")).to_have_value("")
    expect(field).to_be_focused()
    field.press("ControlOrMeta+a")
    page.keyboard.type("2")
    expect(wrong).to_have_count(0)
    page.keyboard.press("Tab")
    expect(form(picking).get_by_role("checkbox", name="cpu")).to_be_focused()
    page.keyboard.press("Tab")
    expect(form(picking).get_by_label("mixed_precision")).to_be_focused()
    page.keyboard.type("bf")
    expect(text(picking, "Cell")).to_have_value(
        'notebook_launcher(train, num_processes=2, cpu=True, mixed_precision="bf16")'
    )
    form(picking).get_by_role("checkbox", name="cpu").focus()
    page.keyboard.type("dd")
    form(picking).get_by_label("Time limit").focus()
    page.keyboard.press("Tab")
    expect(form(picking).get_by_role("button", name="All settings")).to_be_focused()
    page.keyboard.type("b")
    page.keyboard.press("Space")
    expect(form(picking).get_by_label("start_method")).to_be_visible()
    form(picking).get_by_label("Filter").press_sequentially("delay")
    expect(form(picking).get_by_label("start_method")).to_be_hidden()
    expect(form(picking).get_by_label("restart_delay")).to_be_visible()
    text(picking, "Cell").focus()
    page.keyboard.type("dd")
    assert page.locator(".jp-Cell").count() == cells


def test_the_settings_are_tried_while_the_notebook_goes_on(picking: Notebook) -> None:
    fill(picking)
    form(picking).get_by_role("button", name="Test these settings").click()
    checks = form(picking).get_by_role("list", name="Self-test").get_by_role("listitem")
    expect(checks.first).to_contain_text("Workers start")
    run_the_second_cell(picking)
    expect(form(picking)).to_contain_text("All 7 checks passed.")
    expect(checks).to_have_count(7)
    expect(form(picking).get_by_role("button", name="Test these settings")).to_be_enabled()


def test_the_form_is_accessible_in_both_themes_and_on_narrow_pages(picking: Notebook, violations: Any) -> None:
    form(picking).get_by_label("num_processes").fill("0")
    expect(form(picking).get_by_role("alert")).to_be_visible()
    form(picking).get_by_role("button", name="All settings").click()
    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        picking.theme(theme)
        expect(picking.page.locator(".jp-Splash, #jupyterlab-splash, #galaxy")).to_have_count(0)
        for width in (1400, 500):
            picking.page.set_viewport_size({"width": width, "height": 1000})
            assert violations(picking.page, ".acc-picker") == [], (theme, width)
            assert form(picking).evaluate("form => form.scrollWidth <= form.clientWidth"), (theme, width)
