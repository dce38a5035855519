"""Runs beside the notebook: their panels live on, they are awaited, and what they raise is never lost."""

import pytest

from tests.kernel.kernels import Kernel
from tests.kernel.pages import VIEW, Page

TRAIN = """
from accelerate_nb import launch, notebook_launcher
import asyncio, pathlib, time

def train(name, file=None, fail=False):
    print("begin", name, flush=True)
    while file is not None and not pathlib.Path(file).exists():
        time.sleep(0.02)
    if fail:
        raise KeyError(name)
    print("end", name, flush=True)
    return name
"""


@pytest.fixture
def kernel(panel_kernel: Kernel) -> Kernel:
    """A kernel with panels, in which a function to train is defined."""
    panel_kernel.ok(TRAIN)
    return panel_kernel


@pytest.fixture
def page(kernel: Kernel) -> Page:
    """A page that shows the kernel's notebook."""
    return Page(kernel)


def test_two_runs_live_side_by_side(kernel: Kernel, page: Page, tmp_path) -> None:
    go = str(tmp_path / "go")
    first = kernel.ok(f"a = launch(train, ('a', {go!r}), num_processes=2)")
    first_panel = page.until_shown(1)
    second = kernel.ok(f"b = launch(train, ('b', {go!r}), num_processes=2)")
    second_panel = page.until_shown(2)
    for panel, name in ((first_panel, "a"), (second_panel, "b")):
        page.hello(panel)
        page.until(lambda panel=panel, name=name: page.lines(panel).count(f"begin {name}") == 2)
    assert kernel.value("[a.done, b.done]") == [False, False]
    assert kernel.ok("1 + 1").displays[0]["text/plain"] == "2"
    (tmp_path / "go").touch()
    assert kernel.ok("a.wait() + b.wait()").displays[0]["text/plain"] == "'ab'"
    for panel, name in ((first_panel, "a"), (second_panel, "b")):
        page.until(lambda panel=panel: page.state(panel) == "finished")
        assert page.lines(panel).count(f"end {name}") == 2
    # each cell keeps the report of its own run, in the place of the panel
    page.until(lambda: VIEW not in first.displays[0] and VIEW not in second.displays[0])
    assert "end a" in first.displays[0]["text/plain"]
    assert "end b" in second.displays[0]["text/plain"]


def test_a_wait_shows_no_second_panel_and_where_it_gives_up_the_panel_lives_on(
    kernel: Kernel, page: Page, tmp_path
) -> None:
    kernel.ok(f"run = launch(train, ('x', {str(tmp_path / 'go')!r}), num_processes=1)")
    assert kernel.run("run.wait(timeout=0.3)").failure.name == "TimeoutError"
    page.draw()
    cell = kernel.start("run.wait()")
    page.until(lambda: "begin x" in page.lines())
    (tmp_path / "go").touch()
    assert [display["text/plain"] for display in cell.wait().result().displays] == ["'x'"]
    page.until(lambda: page.state() == "finished")
    assert len(page.widgets) == 1


def test_the_notebook_goes_on_while_a_run_is_awaited(kernel: Kernel, page: Page, tmp_path) -> None:
    code = f"""
        async def beside():
            while not run.done:
                await asyncio.sleep(0.01)
                pathlib.Path({str(tmp_path / "go")!r}).touch()
            return "beside"
        run = launch(train, ("x", {str(tmp_path / "go")!r}), num_processes=2, results="all")
        await asyncio.gather(run, beside())
    """
    assert kernel.ok(code).displays[-1]["text/plain"] == "[['x', 'x'], 'beside']"


def test_an_interrupt_of_an_awaiting_cell_ends_the_workers(kernel: Kernel, page: Page, tmp_path) -> None:
    cell = kernel.start(f"run = launch(train, ('x', {str(tmp_path / 'never')!r}), num_processes=2)\nawait run")
    page.draw()
    page.until(lambda: "begin x" in page.lines())
    kernel.interrupt()
    assert cell.wait().error is not None
    assert kernel.value("[run.done, run.view.state]") == [True, "stopped"]


@pytest.mark.parametrize("wait", ["run.wait()", "await run"])
def test_a_failure_is_shown_and_raised_where_the_run_is_waited_for(kernel: Kernel, page: Page, wait: str) -> None:
    launched = kernel.ok("run = launch(train, ('broken',), {'fail': True}, num_processes=2)")
    page.draw()
    page.until(lambda: page.state() == "failed")
    assert page.all_of("failure")[-1]["type"] == "KeyError"
    page.until(lambda: "KeyError" in launched.displays[0].get("text/plain", ""))
    error = kernel.run(wait).failure
    assert error.name == "KeyError"
    assert "broken" in error.text


def test_a_run_shows_itself_again_in_any_cell(kernel: Kernel, page: Page, tmp_path) -> None:
    first = kernel.ok(f"run = launch(train, ('x', {str(tmp_path / 'go')!r}), num_processes=2)\nrun")
    assert len(first.displays) == 1, "the cell that launches shows its run once"
    page.draw()
    again = kernel.ok("run")
    assert again.displays[0][VIEW] == first.displays[0][VIEW]
    assert kernel.ok("print(run)").stdout.startswith("<Run of train: running, 2 ranks")
    (tmp_path / "go").touch()
    kernel.ok("run.wait()")
    page.until(lambda: VIEW not in first.displays[0] and VIEW not in again.displays[0])
    later = kernel.ok("run")
    assert VIEW not in later.displays[0]
    assert "end x" in later.displays[0]["text/plain"]


def test_lines_of_a_run_that_is_followed_as_text_are_written_once(kernel: Kernel) -> None:
    cell = kernel.run("run = launch(train, ('x',), num_processes=2, panel='text')\nrun.follow()")
    waited = kernel.ok("run.wait()")
    Page(kernel).until(lambda: cell.stdout.count("end x") == 2)
    assert "end x" not in waited.stdout


def test_many_runs_leave_few_widgets_behind(kernel: Kernel, page: Page) -> None:
    kernel.ok("for _ in range(12): notebook_launcher(train, ('x',), num_processes=1)")
    for panel in list(page.widgets):
        page.hello(panel)
    page.until(lambda: all(page.messages.values()))
    # those of which a page has the end are taken away as others come
    for _ in range(2):
        kernel.ok("notebook_launcher(train, ('x',), num_processes=1)")
    page.until(lambda: len(page.closed) >= 4)
    widgets = "__import__('ipywidgets').Widget.widgets.values()"
    assert kernel.value(f"sum('panel' not in getattr(one, 'place', ['panel']) for one in {widgets})") <= 8
