"""A saved report in a real browser: the same with and without scripts, in a notebook from elsewhere and in a page made of it."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbconvert import HTMLExporter
from nbformat.v4 import new_code_cell, new_notebook, new_output

from accelerate_nb.events.event_types import LogLine
from accelerate_nb.reports.report import run_report
from tests.browser.cells import SHORT, TRAIN
from tests.browser.jlab import Notebook, Server, opened_in
from tests.reports import stories

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]

EVIL = "</script></pre><img src=x onerror='window.hacked = 1'><script>window.hacked = 1</script>"


def saved() -> nbformat.NotebookNode:
    """A notebook whose first cell ran elsewhere, and failed."""
    view = stories.training(2)
    view.apply(LogLine(0, "stderr", EVIL, stories.STARTED + 29))
    view.apply(stories.FAILURE)
    report = run_report(stories.facts(), stories.end(view, "failed"))
    output = new_output("display_data", data=report)
    cells = [new_code_cell("notebook_launcher(train)", outputs=[output], execution_count=1)]
    spec = {"name": "python3", "display_name": "python3", "language": "python"}
    return new_notebook(cells=cells, metadata={"kernelspec": spec})


def is_report(root: Any) -> None:
    """Tables, pictures that could be drawn, the error, the logs."""
    from playwright.sync_api import expect

    expect(root.get_by_text("rank 1 stopped with ValueError").first).to_be_visible()
    expect(root.get_by_text("loss = criterion(model(x), y)").first).to_be_visible()
    expect(root.get_by_text("pass drop_last=True").first).to_be_visible()
    pictures = root.locator("img[alt^='chart of']")
    expect(pictures).to_have_count(2)
    for picture in pictures.all():
        assert picture.evaluate("async picture => { await picture.decode(); return picture.naturalWidth }") > 0


def test_a_notebook_from_elsewhere_shows_the_report_before_it_is_trusted_and_after(lab: Server, window: Any) -> None:
    nbformat.write(saved(), lab.root / "from_elsewhere.ipynb")
    page = window.new_page()
    cell = Notebook(page, lab, "from_elsewhere.ipynb").open(kernel=False).cell(0)
    is_report(cell)
    # the command ends when its dialog does
    page.evaluate("() => { window.jupyterapp.commands.execute('notebook:trust') }")
    page.get_by_role("button", name="Trust").click()
    is_report(cell)
    assert not page.evaluate("() => 'hacked' in window")
    page.close()


@pytest.mark.parametrize("scripts", [True, False])
def test_a_converted_notebook_shows_the_report_without_a_network(chromium: Any, tmp_path: Path, scripts: bool) -> None:
    page_text, _ = HTMLExporter().from_notebook_node(saved())
    (tmp_path / "page.html").write_text(page_text)
    page = chromium.new_page(offline=True, java_script_enabled=scripts)
    page.goto((tmp_path / "page.html").as_uri())
    is_report(page)
    assert not scripts or not page.evaluate("() => 'hacked' in window")
    page.close()


def test_a_run_that_is_over_is_a_panel_again_after_its_kernel_was_restarted(lab: Server, window: Any) -> None:
    from playwright.sync_api import expect

    attach = "import accelerate_nb\nrun = accelerate_nb.attach(accelerate_nb.runs()[0])"
    with opened_in(window, lab, "over.ipynb", [TRAIN, SHORT, attach, "accelerate_nb.runs()"]) as notebook:
        for number in (0, 1):
            notebook.run_cell(number)
        expect(notebook.cell(1).locator(".anb")).to_have_count(1)
        notebook.save()
        notebook.restart()
        # a page that is loaded anew shows the static report, until the run is attached to
        notebook.open()
        expect(notebook.cell(1).locator("img[alt^='chart of loss']")).to_be_visible()
        expect(notebook.page.locator(".anb")).to_have_count(0)
        for number in (2, 3):
            notebook.run_cell(number)
        notebook.cell(3).get_by_role("button", name="train").first.click()
        for number in (2, 3):
            panel = notebook.cell(number).locator(".anb")
            expect(panel.get_by_role("log").first).to_contain_text("step 19")
            chart = panel.get_by_role("img", name="loss: min")
            chart.scroll_into_view_if_needed()
            box = chart.bounding_box()
            notebook.page.mouse.move(box["x"] + 80, box["y"] + 20)
            notebook.page.mouse.down()
            notebook.page.mouse.move(box["x"] + 140, box["y"] + 20, steps=3)
            notebook.page.mouse.up()
            expect(panel.get_by_role("button", name="Show all")).to_be_visible()
        kept = notebook.save()
        for cell in kept.cells[1:]:
            assert not any("widget-view" in kind for output in cell.outputs for kind in output.get("data", {}))
        assert "chart of loss" in kept.cells[2].outputs[0].data["text/html"]
        # a page that is loaded anew while the kernel lives shows the panel again
        notebook.open()
        expect(notebook.cell(2).locator(".anb").get_by_role("log").first).to_contain_text("step 19")
