"""A page that is loaded anew while a run goes on: what it shows then, and what a notebook saved in it keeps."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.cells import ALIVE, TRAIN
from tests.browser.jlab import Notebook, Server

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

# on a busy machine a page takes its time to load
pytestmark = pytest.mark.timeout(480)

WIDGET = "application/vnd.jupyter.widget-view+json"
ENDS_WHEN_TOLD = """
import os
def until_told(file):
    accelerator = Accelerator()
    print("it has begun", flush=True)
    while not os.path.exists(file):
        time.sleep(0.1)
    print("it was told to end", flush=True)
"""


def kinds(notebook: Notebook) -> list[set[str]]:
    """The forms of what the second cell shows in the notebook's file, once it is saved."""
    return [set(output.data) for output in notebook.save().cells[1].outputs if output.output_type == "display_data"]


def until_reported(notebook: Notebook) -> None:
    """Wait until the panel has given way to the report, which is drawn by a document of its own rules."""
    expect(notebook.cell(1)).to_contain_text("it was told to end")
    notebook.page.wait_for_function(
        "() => !JSON.stringify(window.jupyterapp.shell.currentWidget.context.model.toJSON()).includes('widget-view+json')"
    )


def begun(notebook: Notebook) -> Any:
    panel = notebook.page.locator(".anb")
    expect(panel.get_by_role("log").first).to_contain_text("it has begun")
    return panel


@pytest.mark.parametrize(
    ("app", "while_it_ends"), [("lab", "closed"), pytest.param("notebook7", "open", marks=pytest.mark.slow)]
)
def test_a_page_loaded_anew_saves_the_report(
    request: pytest.FixtureRequest, opened: Callable[..., Notebook], app: str, while_it_ends: str, tmp_path
) -> None:
    server: Server = request.getfixturevalue(app)
    stop_file = tmp_path / "told"
    notebook = opened(
        server,
        TRAIN + ENDS_WHEN_TOLD,
        f"notebook_launcher(until_told, ({str(stop_file)!r},), num_processes=2, cpu=True)",
    )
    notebook.start()
    begun(notebook)
    assert kinds(notebook)[0] == {WIDGET, "text/html", "text/plain"}
    if while_it_ends == "open":
        begun(notebook.open(kernel=False))
        stop_file.touch()
    else:
        notebook.page.goto("about:blank")
        stop_file.touch()
        notebook.open()
    until_reported(notebook)
    expect(notebook.cell(1)).to_contain_text("it was told to end")
    saved = notebook.save().cells[1].outputs[0]
    assert set(saved.data) == {"text/html", "text/plain"}
    assert "it was told to end" in saved.data["text/plain"]


@pytest.mark.parametrize(
    ("app", "detach", "is_saved"),
    [("lab", False, False), pytest.param("notebook7", True, True, marks=pytest.mark.slow)],
)
def test_a_run_in_the_background_that_ends_while_its_page_is_closed_leaves_its_report(
    request: pytest.FixtureRequest, opened: Callable[..., Notebook], app: str, detach: bool, is_saved: bool, tmp_path
) -> None:
    server: Server = request.getfixturevalue(app)
    stop_file = tmp_path / "told"
    cell = f"run = launch(until_told, ({str(stop_file)!r},), num_processes=2, cpu=True, detach={detach})"
    notebook = opened(server, TRAIN + ENDS_WHEN_TOLD, cell, "print('it', run.wait())")
    notebook.save()  # as its writer does, who trusts it
    for number in (0, 1):
        notebook.run_cell(number)
    begun(notebook)
    if is_saved:
        assert kinds(notebook) == [{WIDGET, "text/html", "text/plain"}, {"text/html", "text/plain"}]
        assert notebook.page.locator(".anb-note").is_hidden()
        # the same file with another kernel, which has no such panel
        file = server.root / notebook.name
        file.with_stem(f"{file.stem}-copy").write_bytes(file.read_bytes())
        copy = Notebook(notebook.page, server, f"{file.stem}-copy.ipynb").open()
        expect(copy.cell(1)).to_contain_text("was running when this notebook was saved")
        expect(copy.cell(1)).to_contain_text("accelerate_nb.attach(")
        copy.shut_down()
    notebook.page.goto("about:blank")
    stop_file.touch()
    notebook.open()
    notebook.run_cell(2)
    until_reported(notebook)
    first, *rest = notebook.save().cells[1].outputs
    assert "it was told to end" in first.data["text/plain"]
    assert [output.data for output in rest] == [{"text/html": ""}] * is_saved


def test_the_kernel_is_busy_as_long_as_the_cell_runs(lab: Server, opened: Callable[..., Notebook], tmp_path) -> None:
    stop_file = tmp_path / "told"
    notebook = opened(
        lab,
        TRAIN + ENDS_WHEN_TOLD,
        f"notebook_launcher(until_told, ({str(stop_file)!r},), num_processes=2, cpu=True)",
        ALIVE,
    )
    notebook.start()
    panel = begun(notebook)
    status = notebook.page.locator("#jp-main-statusbar")
    # what a debugger asks is answered beside the cell, and ends with the word that the kernel is idle
    notebook.page.evaluate(
        "() => window.jupyterapp.shell.currentWidget.context.sessionContext.session.kernel"
        ".requestDebug({ seq: 1, type: 'request', command: 'debugInfo' }).done.then(() => null)"
    )
    expect(status).to_contain_text("Busy")
    panel.get_by_role("button", name="Stacks", exact=True).first.click()
    expect(panel.get_by_role("region", name="Stacks")).to_contain_text("until_told")
    expect(status).to_contain_text("Busy")
    stop_file.touch()
    notebook.wait()
    expect(status).to_contain_text("Idle")
