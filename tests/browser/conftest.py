"""A browser, its Jupyter servers and an open notebook: started once, and only where there are both."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from itertools import count
from typing import Any

import pytest

from tests.browser.jlab import TIMEOUT, Notebook, Server, browser_file, chromium as started, opened_in


def _runs(browser: str | None) -> bool:
    if browser is None or shutil.which(browser) is None:
        return False
    # Ubuntu has a command of this name that only says where the browser is to be had
    return subprocess.run([browser, "--version"], capture_output=True, check=False).returncode == 0


# of this package and not of the session: as long as playwright runs, asyncio thinks that this thread is inside a loop
@pytest.fixture(scope="package")
def chromium() -> Iterator[Any]:
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    if not _runs(browser_file()):
        pytest.skip("there is no Chromium that runs on this machine; on Debian: apt-get install chromium")
    from playwright.sync_api import expect

    expect.set_options(timeout=TIMEOUT * 1000)
    with started() as browser:
        yield browser


def _server(app: str, folders: pytest.TempPathFactory) -> Server:
    package = {"lab": "jupyterlab", "notebook": "notebook"}[app]
    if find_spec(package) is None or find_spec("anywidget") is None:
        pytest.skip(f"{package} and anywidget are not both installed: pip install {package} anywidget")
    return Server(folders.mktemp(app), app)


@pytest.fixture(scope="package")
def lab(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """JupyterLab, for the browser."""
    with _server("lab", tmp_path_factory) as server:
        yield server


@pytest.fixture(scope="package")
def notebook7(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Notebook 7, for the browser."""
    with _server("notebook", tmp_path_factory) as server:
        yield server


@pytest.fixture(scope="session")
def violations() -> Callable[..., list[Any]]:
    """Gives the rules that axe finds broken in a page, or in a part of it, with the elements that break them."""

    def found(page: Any, context: str | None = None) -> list[Any]:
        axe = pytest.importorskip("axe_core_python.sync_playwright", reason="axe-core-python is not installed").Axe()
        return [(item["id"], [node["html"] for node in item["nodes"]]) for item in axe.run(page, context)["violations"]]

    return found


@pytest.fixture(scope="package")
def _page_errors() -> list[str]:
    """What scripts of the shared window's pages did not catch."""
    return []


@pytest.fixture(autouse=True)
def _our_scripts_are_well(_page_errors: list[str]) -> Iterator[None]:
    """Errors of our own module, which anywidget loads from a blob, fail the test; the applications have errors of their own."""
    yield
    ours = [error for error in _page_errors if "blob:" in error]
    _page_errors.clear()
    assert ours == []


@pytest.fixture(scope="package")
def window(chromium: Any, _page_errors: list[str]) -> Iterator[Any]:
    """A window of the browser, whose tabs share what they have loaded."""
    context = chromium.new_context(viewport={"width": 1400, "height": 1000})
    context.set_default_timeout(TIMEOUT * 1000)
    context.on("weberror", lambda found: _page_errors.append(f"{found.error} {found.error.stack}"))
    yield context
    context.close()


@pytest.fixture(scope="package")
def given(lab: Server, window: Any) -> Iterator[Callable[..., Notebook]]:
    """Gives other cells to a notebook that is open all the time; its kernel remembers what others have run in it."""
    running: list[Notebook] = []
    with ExitStack() as stack:

        def give(*cells: str) -> Notebook:
            if not running or not running[-1].is_idle():
                running.append(stack.enter_context(opened_in(window, lab, f"given-{len(running)}.ipynb")))
            return running[-1].give(*cells)

        yield give


# a file of each notebook's own: a page that closes may still be saving the one before
_numbers = count()


@pytest.fixture
def opened(window: Any) -> Iterator[Callable[..., Notebook]]:
    """Opens a notebook with cells in a tab of its own, with a kernel of its own that is shut down at the end."""
    with ExitStack() as stack:

        def open_(server: Server, *cells: str, kernel: str = "python3") -> Notebook:
            return stack.enter_context(opened_in(window, server, f"own-{next(_numbers)}.ipynb", cells, kernel))

        yield open_
