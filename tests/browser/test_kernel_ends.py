"""A kernel that ends while a run goes on: what its notebook shows then, and what it keeps."""

from collections.abc import Callable
from typing import Any

import psutil
import pytest

from tests.browser.cells import ALIVE, RUN, TRAIN
from tests.browser.jlab import Notebook, Server
from tests.browser.test_running import moves

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

# on a busy machine a page takes its time to load
pytestmark = pytest.mark.timeout(480)


def kill(notebook: Notebook) -> None:
    kernel = notebook.page.evaluate(
        "() => window.jupyterapp.shell.currentWidget.context.sessionContext.session.kernel.id"
    )
    [process] = [
        item
        for item in psutil.process_iter(["cmdline"])
        if f"kernel-{kernel}.json" in " ".join(item.info["cmdline"] or ())
    ]
    process.kill()


def answered_late(route: Any) -> None:
    if route.request.method != "PUT":
        return route.continue_()
    response = route.fetch()
    route.request.frame.page.wait_for_timeout(1500)
    return route.fulfill(response=response)


@pytest.mark.parametrize(
    ("end", "message", "kept", "cells"),
    [
        (Notebook.restart, "The kernel was restarted", "The kernel was restarted", (TRAIN, RUN)),
        (kill, "The kernel died", "The kernel died", (TRAIN, "run = launch(train, num_processes=2, cpu=True)", ALIVE)),
        (
            Notebook.shut_down,
            "Stopped by you",  # by the kernel, which leaves in good order, and keeps its own report
            "■ stopped",
            ("%load_ext accelerate_nb", f"%%accelerate -n 2 --cpu --panel widget\n{TRAIN}\ntrain()"),
        ),
    ],
)
def test_what_came_of_a_run_outlives_its_kernel(
    lab: Server,
    opened: Callable[..., Notebook],
    end: Callable[[Notebook], None],
    message: str,
    kept: str,
    cells: tuple[str, ...],
) -> None:
    # a kernel that leaves in good order writes its last outputs itself: JupyterLab saves them when it saves next
    with lab.setting(
        "@jupyterlab/docmanager-extension/plugin", autosaveInterval=2 if end is Notebook.shut_down else 120
    ):
        notebook = opened(lab, *cells)
    notebook.start()
    panel = notebook.page.locator(".anb")
    moves(panel)
    # the file is written, and the page not told yet; JupyterLab's own saves would come in each other's way
    saves = end is not Notebook.shut_down
    if saves:
        notebook.page.route("**/api/contents/*.ipynb*", answered_late)
        notebook.page.evaluate("() => void window.jupyterapp.shell.currentWidget.context.save()")
    end(notebook)
    note = panel.get_by_role("note")
    expect(note).to_contain_text(message)
    expect(panel.get_by_role("button", name="Stop", exact=True)).to_have_count(0)
    # nobody saves the notebook: a page that is loaded anew shows what is left of the run from the file alone
    file = lab.root / notebook.name
    while kept not in file.read_text():
        notebook.page.wait_for_timeout(100)
    notebook.page.wait_for_function("() => !window.jupyterapp.shell.currentWidget.context.model.dirty")
    if saves:
        expect(notebook.page.locator(".jp-Dialog", has_text="File Changed")).to_have_count(0)
    notebook.open(kernel=False)
    for text in (kept, "step", "loss", "All output: "):
        expect(notebook.cell(1)).to_contain_text(text)
    expect(panel).to_have_count(0)
    assert "Error displaying widget" not in notebook.output(1)
    assert "was running when this notebook was saved" not in notebook.output(1)


# JupyterLab looks for the model of a view every 100 ms for two seconds: on a slow page its first pause outlasts them
SLOW = "const later = setTimeout; window.setTimeout = (what, delay) => later(what, delay === 100 ? 3000 : delay)"


def test_a_page_loaded_anew_shows_the_run_again_before_the_panel_is_saved_and_where_it_is_slow(
    lab: Server, opened: Callable[..., Notebook]
) -> None:
    notebook = opened(lab, TRAIN, RUN)
    notebook.save()  # as its writer does, who trusts it; what runs from now on is not in the file
    notebook.start()
    panel = notebook.page.locator(".anb")
    moves(panel)
    notebook.open(kernel=False)
    moves(panel)
    notebook.save()
    notebook.page.add_init_script(SLOW)
    notebook.open(kernel=False)
    moves(panel)
    panel.get_by_role("button", name="Stop").click()
    expect(panel.locator(".anb-title .anb-chip")).to_contain_text("stopped")
