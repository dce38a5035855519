"""The panel of a run in a real kernel: it is fed, and its buttons work, while the cell runs."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel.kernels import Cell, Kernel, kernel as started
from tests.kernel.pages import VIEW, Page
from tests.kernelspecs import INSTALLED, OTHERS, python_path

TRAIN = """
def train(rounds=10**9):
    import time
    for number in range(rounds):
        print("round", number, flush=True)
        time.sleep(0.02)
    return rounds
"""
LAUNCH = "notebook_launcher(train, num_processes=2)"
WIDGET = {"ACCELERATE_NB_PANEL": "widget"}


@pytest.fixture(
    scope="module", params=[INSTALLED, *(pytest.param(version, marks=pytest.mark.slow) for version in OTHERS)]
)
def _of_a_version(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with started(tmp_path_factory.mktemp("kernel"), **WIDGET, PYTHONPATH=python_path(request.param)) as running:
        assert running.value("__import__('ipykernel').__version__") == request.param
        yield running


@pytest.fixture
def any_kernel(_of_a_version: Kernel) -> Kernel:
    """A kernel of each version, with panels."""
    _of_a_version.listeners.clear()
    return _of_a_version


@pytest.fixture
def kernel(panel_kernel: Kernel) -> Kernel:
    """A kernel with panels."""
    return panel_kernel


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel of which no page has heard."""
    with started(tmp_path, **WIDGET) as running:
        yield running


def running_panel(kernel: Kernel, code: str = LAUNCH) -> tuple[Cell, Page]:
    """A cell that trains, and a page that has drawn its panel and was told of it."""
    kernel.ok(TRAIN)
    page = Page(kernel)
    cell = kernel.start(code)
    page.draw()
    page.until(page.lines)
    return cell, page


def kill(cell: Cell, page: Page) -> None:
    page.send({"do": "kill"})
    cell.wait()


def test_a_cell_that_arrives_as_the_former_ends_is_run(any_kernel: Kernel) -> None:
    assert all(any_kernel.ok("0", timeout=20).done for _ in range(300))


def test_messages_reach_the_page_and_the_kernel_while_the_cell_runs(any_kernel: Kernel) -> None:
    cell, page = running_panel(any_kernel)
    assert page.all_of("run")[0].items() >= {"size": 2, "can_act": True}.items()
    page.send({"do": "stacks"})
    page.until(lambda: page.all_of("stacks"))
    assert "time.sleep(0.02)" in page.all_of("stacks")[0]["text"]
    page.send({"do": "stop"})
    assert cell.wait().error is not None
    assert page.state() == "stopped"


def test_a_page_that_is_loaded_anew_gets_its_widgets_while_the_cell_runs(any_kernel: Kernel) -> None:
    cell, page = running_panel(any_kernel)
    assert any_kernel.reply(any_kernel.send("kernel_info_request", {}), 10)["status"] == "ok"
    comms = any_kernel.reply(any_kernel.send("comm_info_request", {"target_name": "jupyter.widget"}), 10)["comms"]
    assert page.panel in comms
    states: list[dict] = []
    any_kernel.listeners.append(lambda message: states.append(message["content"].get("data", {})))
    control = {"comm_id": "control", "target_name": "jupyter.widget.control", "data": {}}
    any_kernel.send("comm_open", control, version="1.0.0")
    any_kernel.send("comm_msg", {"comm_id": "control", "data": {"method": "request_states"}})
    page.until(lambda: any(state.get("method") == "update_states" for state in states), 10)
    assert page.panel in next(state for state in states if state.get("method") == "update_states")["states"]
    # a slow page requests each widget's state on the widget's own comm, and takes nothing but a reply to that
    parents: list[str] = []

    def listen(message: dict) -> None:
        data = message["content"].get("data", {})
        if data.get("method") == "update" and data["state"]:
            parents.append(message["parent_header"].get("msg_id", ""))

    any_kernel.listeners.append(listen)
    request = any_kernel.send("comm_msg", {"comm_id": page.panel, "data": {"method": "request_state"}})
    page.until(lambda: request in parents, 10)
    assert not cell.done
    kill(cell, page)


def test_cells_that_wait_run_afterwards_in_their_order(any_kernel: Kernel) -> None:
    cell, _ = running_panel(any_kernel, "notebook_launcher(train, (20,), num_processes=2)")
    later = [any_kernel.start(f"print({number})") for number in range(3)]
    any_kernel.send("kernel_info_request", {})
    assert [item.wait().result().stdout for item in later] == ["0\n", "1\n", "2\n"]
    assert (cell.done, cell.error) == (True, None)
    assert any_kernel.ok("print('as before')").stdout == "as before\n"
    # what reads the kernel's messages is ipykernel's own
    reader = any_kernel.value("repr(get_ipython().kernel.shell_stream._recv_callback)")
    assert "accelerate_nb" not in reader


def test_an_interrupt_ends_a_run_that_a_panel_shows(any_kernel: Kernel) -> None:
    cell, page = running_panel(any_kernel)
    any_kernel.interrupt()
    assert cell.wait().failure.name == "KeyboardInterrupt"
    page.until(lambda: page.state() == "stopped")
    assert any_kernel.ok("1 + 1").done


def test_messages_of_a_background_run_reach_the_page_and_the_kernel(any_kernel: Kernel) -> None:
    _, page = running_panel(any_kernel, "run = launch(train, num_processes=2)")
    assert page.all_of("run")[0]["background"] is True
    before = len(page.lines())
    page.until(lambda: len(page.lines()) > before)
    page.send({"do": "stop"})
    page.until(lambda: page.state() == "stopped")
    assert any_kernel.run("run.wait()").error is not None


def test_without_a_page_the_run_is_shown_as_html_until_one_comes(fresh: Kernel) -> None:
    fresh.ok(TRAIN)
    page = Page(fresh)
    cell = fresh.start(LAUNCH)
    page.until(lambda: cell.displays)
    assert VIEW in cell.displays[0]
    page.until(lambda: VIEW not in cell.displays[0] and "round" in cell.displays[0]["text/plain"])
    first = cell.displays[0]["text/html"]
    page.until(lambda: cell.displays[0]["text/html"] != first)
    assert not page.messages[page.panel], "nobody was there to be told"
    page.hello()
    page.until(lambda: VIEW in cell.displays[0])
    page.until(page.lines)
    kill(cell, page)
    assert VIEW not in cell.displays[0]


def test_a_page_that_is_loaded_anew_is_sent_everything_again_and_a_second_view_nothing_twice(kernel: Kernel) -> None:
    cell, page = running_panel(kernel)
    resets = lambda: sum(bool(item.get("reset")) for item in page.messages[page.panel])  # noqa: E731
    assert resets() == 1
    page.hello(seq=page.messages[page.panel][-1]["seq"])
    before = len(page.messages[page.panel])
    page.until(lambda: len(page.messages[page.panel]) > before + 3)
    assert resets() == 1
    page.hello()
    page.until(lambda: resets() == 2)
    assert page.lines()[0].startswith("round 0")
    kill(cell, page)


def test_what_a_rank_displays_is_shown_under_the_panel_and_an_attached_run_once(kernel: Kernel) -> None:
    cell = kernel.ok("""
    def show():
        from IPython.display import HTML, display
        display(HTML("<b>draft</b>"), display_id=True).update(HTML("<b>figure</b>"))
    notebook_launcher(show, num_processes=1)
    """)
    later = kernel.ok("import accelerate_nb\naccelerate_nb.attach(accelerate_nb.runs()[0])")
    for shown in (cell, later):
        assert [display.get("text/html") for display in shown.displays][1:] == ["<b>figure</b>"]


def test_a_fault_in_showing_does_not_end_the_run(kernel: Kernel) -> None:
    code = """
        from unittest.mock import patch
        from accelerate_nb.notebook.display.message_feed import MessageFeed
        with patch.object(MessageFeed, "backlog", side_effect=ZeroDivisionError("wrong")):
            print("returned", notebook_launcher(train, (30,), num_processes=1))
    """
    kernel.ok(TRAIN)
    page = Page(kernel)
    cell = kernel.start(code)
    page.draw()
    assert cell.wait().result().stdout.endswith("returned 30\n")
    assert "can't be shown any more (ZeroDivisionError: wrong)" in cell.stderr


FAILS = """
import os, time
def fails(gate):
    while not os.path.exists(gate):
        time.sleep(0.02)
    raise KeyError("no such thing")
"""
LAUNCHED = FAILS + "notebook_launcher(fails, ({gate!r},), num_processes=2)"
IN_A_SESSION = "%%accelerate -n 2 --cpu --panel widget" + FAILS + "fails({gate!r})"


@pytest.mark.parametrize(
    ("code", "follows"),
    [(LAUNCHED, ""), (IN_A_SESSION, " The session goes on, and keeps its variables (2 ranks).")],
    ids=["run", "cell of a session"],
)
def test_a_failure_that_the_panel_shows_is_one_line_under_it(
    kernel: Kernel, tmp_path: Path, code: str, follows: str
) -> None:
    kernel.ok("%load_ext accelerate_nb")
    page = Page(kernel)
    cell = kernel.start(code.format(gate=str(tmp_path / "gate")))
    page.draw()
    page.until(lambda: page.all_of("run"))
    (tmp_path / "gate").touch()
    error, again = cell.wait().failure, kernel.run("%tb").failure
    line = r"KeyError: rank \d stopped with KeyError: 'no such thing' \(the run's panel has [^)]*\)"
    assert re.fullmatch(line + re.escape(follows), error.traceback)
    assert "All output: " in error.text
    assert 'raise KeyError("no such thing")' in again.traceback
    kernel.ok("%accelerate stop")
