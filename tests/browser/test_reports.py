"""A saved report in a real browser: static where scripts are kept out, the panel itself where they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbconvert import HTMLExporter
from nbformat.v4 import new_code_cell, new_notebook, new_output

from accelerate_nb.events.model import LogLine
from accelerate_nb.notebook.display.saved_report import bundle
from tests.browser.jlab import Notebook, Server
from tests.reports import stories

pytestmark = pytest.mark.slow

EVIL = "</script></pre><img src=x onerror='window.hacked = 1'><script>window.hacked = 1</script>"


def saved(*other_runs: str) -> nbformat.NotebookNode:
    """A notebook whose first cell ran elsewhere, and failed; reports of `other_runs` above it use its code."""
    view = stories.training(2)
    view.apply(LogLine(0, "stderr", EVIL, stories.STARTED + 29))
    view.apply(stories.FAILURE)
    stories.end(view, "failed")
    reports = [bundle(stories.facts(name), view, live=False, interactive=True, with_code=False) for name in other_runs]
    reports.append(bundle(stories.facts(), view, live=False, interactive=True))
    cells = [
        new_code_cell("notebook_launcher(train)", outputs=[new_output("display_data", data=data)], execution_count=1)
        for data in reports
    ]
    spec = {"name": "python3", "display_name": "python3", "language": "python"}
    return new_notebook(cells=cells, metadata={"kernelspec": spec})


def is_static(root: Any) -> None:
    """What a reader sees without a script: tables, pictures that could be drawn, the error, the logs."""
    from playwright.sync_api import expect

    expect(root.get_by_text("rank 1 stopped with ValueError").first).to_be_visible()
    expect(root.get_by_text("loss = criterion(model(x), y)").first).to_be_visible()
    expect(root.get_by_text("pass drop_last=True").first).to_be_visible()
    pictures = root.locator("img[alt^='chart of']")
    expect(pictures).to_have_count(2)
    for picture in pictures.all():
        assert picture.evaluate("async picture => { await picture.decode(); return picture.naturalWidth }") > 0
    expect(root.get_by_role("tab")).to_have_count(0)


def is_panel(root: Any) -> None:
    """The panel has taken the report's place, and answers."""
    from playwright.sync_api import expect

    expect(root.get_by_role("tab", name="All ranks")).to_be_visible()
    expect(root.locator("img[alt^='chart of']").first).to_be_hidden()
    expect(root.get_by_text("loss = criterion(model(x), y)").first).to_be_visible()
    root.get_by_placeholder("Search").fill("step   290")
    expect(root.get_by_text("step   290").first).to_be_visible()


def hacked(page: Any) -> bool:
    return bool(page.evaluate("() => 'hacked' in window"))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The notebook as nbconvert writes it for others."""
    page, _ = HTMLExporter().from_notebook_node(saved())
    file = tmp_path_factory.mktemp("converted") / "page.html"
    file.write_text(page)
    return file


@pytest.fixture
def offline(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Opens a file in a browser that has no network."""
    contexts: list[Any] = []

    def open_(file: Path, **options: Any) -> Any:
        contexts.append(chromium.new_context(offline=True, **options))
        page = contexts[-1].new_page()
        page.goto(file.as_uri())
        return page

    yield open_
    for context in contexts:
        context.close()


def test_a_notebook_from_elsewhere_shows_the_report_until_it_is_trusted(lab: Server, window: Any) -> None:
    nbformat.write(saved(), lab.root / "from_elsewhere.ipynb")
    page = window.new_page()
    notebook = Notebook(page, lab, "from_elsewhere.ipynb").open(kernel=False)
    cell = notebook.cell(0)
    is_static(cell)
    # the command ends when its dialog does
    page.evaluate("() => { window.jupyterapp.commands.execute('notebook:trust') }")
    page.get_by_role("button", name="Trust").click()
    is_panel(cell)
    assert not hacked(page)
    page.close()


def test_a_converted_notebook_is_interactive_without_a_network(file: Path, offline: Callable[..., Any]) -> None:
    page = offline(file)
    is_panel(page)
    assert not hacked(page)


def test_one_copy_of_the_code_serves_all_reports_of_a_page(tmp_path: Path, offline: Callable[..., Any]) -> None:
    page, _ = HTMLExporter().from_notebook_node(saved("before"))
    (tmp_path / "page.html").write_text(page)
    cells = offline(tmp_path / "page.html").locator(".jp-CodeCell")
    is_panel(cells.nth(0))
    is_panel(cells.nth(1))


def test_without_scripts_the_report_stays(file: Path, offline: Callable[..., Any]) -> None:
    is_static(offline(file, java_script_enabled=False))


def test_where_loading_code_is_forbidden_the_report_stays(file: Path, offline: Callable[..., Any]) -> None:
    rule = "<head><meta http-equiv='Content-Security-Policy' content=\"script-src 'unsafe-inline'\">"
    strict = file.with_name("strict.html")
    strict.write_text(file.read_text().replace("<head>", rule, 1))
    page = offline(strict)
    page.wait_for_load_state()
    is_static(page)
    assert not hacked(page)
