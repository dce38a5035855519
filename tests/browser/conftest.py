"""A browser with a Jupyter server: started once, and only where there are both."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from tests.browser.jlab import PATIENCE, Notebook, Server, browser_file, chromium as started


def _runs(browser: str | None) -> bool:
    # Ubuntu has a command of this name that only says where the browser is to be had
    return (
        browser is not None and subprocess.run([browser, "--version"], capture_output=True, check=False).returncode == 0
    )


# of a module and not of the session: as long as playwright runs, asyncio thinks that this thread is inside a loop
@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    if not _runs(browser_file()):
        pytest.skip("there is no Chromium that runs on this machine; on Debian: apt-get install chromium")
    from playwright.sync_api import expect

    expect.set_options(timeout=PATIENCE * 1000)
    with started() as browser:
        yield browser


def _server(app: str, folders: pytest.TempPathFactory) -> Server:
    package = {"lab": "jupyterlab", "notebook": "notebook"}[app]
    if find_spec(package) is None or find_spec("anywidget") is None:
        pytest.skip(f"{package} and anywidget are not both installed: pip install {package} anywidget")
    return Server(folders.mktemp(app), app)


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """JupyterLab."""
    with _server("lab", tmp_path_factory) as server:
        yield server


@pytest.fixture(scope="session")
def notebook7(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Notebook 7."""
    with _server("notebook", tmp_path_factory) as server:
        yield server


@pytest.fixture(scope="module")
def window(chromium: Any) -> Iterator[Any]:
    """A window of the browser, whose tabs share what they have loaded."""
    context = chromium.new_context(viewport={"width": 1400, "height": 1000})
    context.set_default_timeout(PATIENCE * 1000)
    yield context
    context.close()


@pytest.fixture
def opened(window: Any, request: pytest.FixtureRequest) -> Iterator[Callable[..., Notebook]]:
    """
    Opens a notebook with cells, in a tab of its own; at the end its kernel is shut down.

    Errors of our own module, which anywidget loads from a blob, fail the test; the applications have errors of their own.
    """
    notebooks: list[Notebook] = []
    errors: list[str] = []

    def open_(server: Server, *cells: str, kernel: str = "python3") -> Notebook:
        plain = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
        name = f"{plain}-{len(notebooks)}.ipynb"
        server.write(name, list(cells), kernel)
        page = window.new_page()
        page.on("pageerror", lambda error: errors.append(f"{error} {error.stack}"))
        notebook = Notebook(page, server, name)
        notebooks.append(notebook)
        return notebook.open()

    yield open_
    for notebook in notebooks:
        notebook.shut_down()
        notebook.page.close()
    assert [error for error in errors if "blob:" in error] == []
