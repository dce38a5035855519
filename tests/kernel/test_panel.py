"""The panel of a run in a real kernel: it is fed, and its buttons work, while the cell runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.kernel.kernels import ROOT, Cell, Kernel, kernel as started
from tests.kernel.pages import Page

# ipykernel 6 reads its messages in the thread that a cell blocks; 7.0 knows no cell in a thread; 7.4 sends clicks to the
# cell's own shell. Beside them the first of the two kinds, and the one in between.
OLDER = ("6.29.5", "6.31.0", "7.0.1", "7.1.0", "7.3.0")

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


@pytest.fixture(scope="session")
def ipykernels(request: pytest.FixtureRequest) -> Callable[[str], dict[str, str]]:
    """The environment in which a kernel is of a version of ipykernel; `installed` is the one that is there anyway."""

    def environment(version: str) -> dict[str, str]:
        if version == "installed":
            return {}
        target = request.config.cache.mkdir(f"ipykernel-{version}")
        if not (target / "ipykernel").exists():
            wanted = ["--no-deps", "--target", str(target), f"ipykernel=={version}"]
            done = subprocess.run(
                [sys.executable, "-m", "pip", "install", "-q", *wanted], capture_output=True, text=True
            )
            if done.returncode:
                pytest.skip(f"ipykernel {version} can't be had: {done.stderr.strip().splitlines()[-1]}")
        return {"PYTHONPATH": f"{target}:{ROOT}"}

    return environment


@pytest.fixture(params=["installed", *(pytest.param(version, marks=pytest.mark.slow) for version in OLDER)])
def any_kernel(
    request: pytest.FixtureRequest, ipykernels: Callable[[str], dict[str, str]], tmp_path: Path
) -> Iterator[Kernel]:
    """A kernel of each version, with panels."""
    version = request.param
    with started(tmp_path, **WIDGET, **ipykernels(version)) as running:
        if version != "installed":
            assert running.value("__import__('ipykernel').__version__") == version
        yield running


@pytest.fixture(scope="module")
def _panel_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Kernel]]:
    running: list[Kernel] = []
    with ExitStack() as stack:

        def get() -> Kernel:
            if not running or not running[-1].alive:
                running.append(stack.enter_context(started(tmp_path_factory.mktemp("panel"), **WIDGET)))
            running[-1].listeners.clear()
            return running[-1]

        yield get


@pytest.fixture
def kernel(_panel_kernel: Callable[[], Kernel]) -> Kernel:
    """A kernel with panels."""
    return _panel_kernel()


def running_panel(kernel: Kernel, code: str = LAUNCH) -> tuple[Cell, Page]:
    """A cell that trains, and a page that has drawn its panel and was told of it."""
    kernel.ok(TRAIN)
    page = Page(kernel)
    cell = kernel.start(code)
    page.until_shown()
    page.hello()
    page.until(page.lines)
    return cell, page


# ------------------------------------------------------------------------------------------------- on every ipykernel


def test_a_page_is_told_and_heard_while_the_cell_runs(any_kernel: Kernel) -> None:
    cell, page = running_panel(any_kernel)
    assert page.all_of("run")[0]["size"] == 2
    assert page.all_of("run")[0]["can_act"] is True
    page.say({"do": "stacks"})
    page.until(lambda: page.all_of("stacks"))
    assert "time.sleep(0.02)" in page.all_of("stacks")[0]["text"]
    page.say({"do": "stop"})
    cell.wait()
    assert cell.error is not None
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
    page.until(lambda: any(one.get("method") == "update_states" for one in states), 10)
    assert page.panel in next(one for one in states if one.get("method") == "update_states")["states"]
    assert not cell.done
    page.say({"do": "kill"})
    cell.wait()


def test_cells_that_wait_run_afterwards_in_their_order(any_kernel: Kernel) -> None:
    cell, _ = running_panel(any_kernel, "notebook_launcher(train, (20,), num_processes=2)")
    later = [any_kernel.start(f"print({number})") for number in range(3)]
    any_kernel.send("kernel_info_request", {})
    assert [one.wait().result().stdout for one in later] == ["0\n", "1\n", "2\n"]
    assert cell.done
    assert cell.error is None
    assert any_kernel.ok("print('as before')").stdout == "as before\n"
    # the lane is gone: what reads the kernel's messages is ipykernel's own
    reader = any_kernel.value("repr(get_ipython().kernel.shell_stream._recv_callback)")
    assert "accelerate_nb" not in reader
    assert "Lane" not in reader


def test_an_interrupt_ends_a_run_that_a_panel_shows(any_kernel: Kernel) -> None:
    cell, page = running_panel(any_kernel)
    any_kernel.interrupt()
    cell.wait()
    assert cell.error is not None
    assert cell.error.name == "KeyboardInterrupt"
    assert page.state() == "stopped"
    assert any_kernel.ok("1 + 1").done


def test_a_background_run_is_told_and_heard(any_kernel: Kernel) -> None:
    _, page = running_panel(any_kernel, "run = launch(train, num_processes=2)")
    assert page.all_of("run")[0]["background"] is True
    before = len(page.lines())
    page.until(lambda: len(page.lines()) > before)
    page.say({"do": "stop"})
    page.until(lambda: page.state() == "stopped")
    assert any_kernel.run("run.wait()").error is not None
