"""JupyterLab and Notebook 7 in a real browser, as a person sees them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import nbformat
from nbformat.v4 import new_code_cell, new_notebook

from tests.kernel.kernels import OF_A_SHELL
from tests.kernelspecs import install

# How long anything that a person would wait for may take, on a machine that does other things too.
TIMEOUT = 120.0
_FLAGS = {
    "lab": ["--LabApp.expose_app_in_browser=True", "--LabApp.news_url="],
    "notebook": ["--JupyterNotebookApp.expose_app_in_browser=True"],
}
_SETTINGS: dict[str, dict[str, Any]] = {
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    # cells out of sight are in the page too
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
}
_IDLE = "() => window.jupyterapp.shell.currentWidget?.context.sessionContext.session?.kernel?.status === 'idle'"


def browser_file() -> str | None:
    """The Chromium of this machine, or the one that `CHROMIUM` names."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


class Server:
    """A Jupyter server of its own: a free port, and every folder that it uses under one."""

    def __init__(self, folder: Path, app: Literal["lab", "notebook"]) -> None:
        self.folder, self.app = folder, app
        self.root = folder / "root"
        self.root.mkdir(parents=True)
        for plugin, values in _SETTINGS.items():
            self.settings(plugin, values)

    def __enter__(self) -> Server:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        with (self.folder / "server.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "jupyter", self.app, "--no-browser", "--allow-root"),
                    *("--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0"),
                    *("--IdentityProvider.token=", "--ServerApp.password=", f"--ServerApp.root_dir={self.root}"),
                    *_FLAGS[self.app],
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                start_new_session=True,
            )
        self._wait_until_it_answers()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            # it shuts its kernels down
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _environment(self) -> dict[str, str]:
        variables = {name: value for name, value in os.environ.items() if name not in OF_A_SHELL}
        folders = {
            "JUPYTER_CONFIG_DIR": "config",
            "JUPYTER_DATA_DIR": "data",
            "JUPYTER_RUNTIME_DIR": "runtime",
            "JUPYTERLAB_SETTINGS_DIR": "settings",
            "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
            "IPYTHONDIR": "ipython",
            "XDG_CACHE_HOME": "cache",
        }
        return {
            **{name: value for name, value in variables.items() if not name.lower().endswith("_proxy")},
            **{name: str(self.folder / folder) for name, folder in folders.items()},
            "JUPYTER_NO_CONFIG": "1",
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
            "CUDA_VISIBLE_DEVICES": "",  # a machine without accelerators, whatever this one has
        }

    def _wait_until_it_answers(self) -> None:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        deadline = time.monotonic() + TIMEOUT
        while True:
            try:
                opener.open(f"{self.url}/api/status", timeout=2).close()
                return
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((self.folder / "server.log").read_text()[-3000:]) from None
                time.sleep(0.1)

    def settings(self, plugin: str, values: dict[str, Any]) -> Path:
        """Set what a plugin of the page is set to, in a file; pages that are opened from now on know it."""
        file = self.folder / "settings" / f"{plugin}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
        return file

    @contextmanager
    def setting(self, plugin: str, **values: Any) -> Iterator[None]:
        """The same, for pages that are opened in the block."""
        file = self.settings(plugin, values)
        try:
            yield
        finally:
            file.unlink()

    def kernel(self, ipykernel: str) -> str:
        """The name of a kernel with this ipykernel."""
        return install(ipykernel, self.folder / "data" / "kernels")

    def write(self, name: str, cells: Iterable[str], kernel: str = "python3") -> Path:
        """A notebook file with these cells."""
        spec = {"name": kernel, "display_name": kernel, "language": "python"}
        file = self.root / name
        nbformat.write(new_notebook(cells=list(map(new_code_cell, cells)), metadata={"kernelspec": spec}), file)
        return file


class Notebook:
    """A notebook that is open in a page."""

    def __init__(self, page: Any, server: Server, name: str) -> None:
        self.page, self.server, self.name = page, server, name

    def open(self, *, kernel: bool = True) -> Notebook:
        """Load the page, anew where it is there already; with `kernel`, wait until that is ready."""
        address = f"/doc/tree/{self.name}?reset" if self.server.app == "lab" else f"/notebooks/{self.name}"
        self.page.goto(self.server.url + address, timeout=TIMEOUT * 1000)
        # the page may load itself once more on its way, which ends what is evaluated in it and not what is waited for
        self.page.wait_for_function("() => window.jupyterapp?.restored.then(() => true)", timeout=TIMEOUT * 1000)
        self.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=TIMEOUT * 1000)
        if kernel:
            self.page.wait_for_function(_IDLE, timeout=TIMEOUT * 1000)
        return self

    def give(self, *cells: str) -> Notebook:
        """Put these cells in the place of all that are there; the kernel stays."""
        self.page.evaluate(
            """(cells) => {
              const shared = window.jupyterapp.shell.currentWidget.content.model.sharedModel;
              shared.transact(() => {
                shared.deleteCellRange(0, shared.cells.length);
                shared.insertCells(0, cells.map((source) => ({ cell_type: "code", source, metadata: {} })));
              });
            }""",
            cells,
        )
        self.page.wait_for_function(
            "(number) => document.querySelectorAll('.jp-Notebook .jp-CodeCell').length === number", arg=len(cells)
        )
        return self

    def is_idle(self) -> bool:
        """Whether the kernel is there and does nothing, which it may need a moment for."""
        from playwright.sync_api import TimeoutError as TookTooLong

        try:
            self.page.wait_for_function(_IDLE, timeout=10_000)
        except TookTooLong:
            return False
        return True

    def command(self, name: str, **arguments: Any) -> None:
        """Do what a menu entry or a key does."""
        self.page.evaluate(
            "([name, given]) => window.jupyterapp.commands.execute(name, given).then(() => null)", [name, arguments]
        )

    def start(self) -> None:
        """Run all cells, without waiting for them."""
        self.page.evaluate(
            "() => { window.__ran = false; window.jupyterapp.commands.execute('notebook:run-all-cells')"
            ".finally(() => { window.__ran = true }) }"
        )

    def wait(self, timeout: float = TIMEOUT) -> None:
        """Wait until the cells that were started have run."""
        self.page.wait_for_function("() => window.__ran === true", timeout=timeout * 1000)

    def run(self) -> None:
        """Run all cells to their end."""
        self.start()
        self.wait()

    def run_cell(self, number: int) -> None:
        """Run one cell to its end."""
        self.page.evaluate(
            "(number) => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = number }", number
        )
        self.command("notebook:run-cell")

    def save(self) -> nbformat.NotebookNode:
        """Save the notebook; gives what is in its file."""
        self.command("docmanager:save")
        return nbformat.read(self.server.root / self.name, as_version=4)

    def theme(self, name: str) -> None:
        """Change the colours of the whole page."""
        self.command("apputils:change-theme", theme=name)
        self.page.wait_for_function("(name) => document.body.dataset.jpThemeName === name", arg=name)

    def cell(self, number: int) -> Any:
        """A code cell."""
        return self.page.locator(".jp-Notebook .jp-CodeCell").nth(number)

    def output(self, number: int) -> str:
        """What a cell shows, as text."""
        return "\n".join(self.cell(number).locator(".jp-OutputArea-output").all_inner_texts())

    def restart(self) -> None:
        """End the kernel, and start another in its place."""
        context = "window.jupyterapp.shell.currentWidget.context.sessionContext"
        self.page.evaluate(f"() => {context}.restartKernel().then(() => null)")

    def shut_down(self) -> None:
        """End the kernel."""
        self.page.evaluate("() => window.jupyterapp.shell.currentWidget?.context.sessionContext.shutdown()")


@contextmanager
def opened_in(
    window: Any, server: Server, name: str, cells: Iterable[str] = ("pass",), kernel: str = "python3"
) -> Iterator[Notebook]:
    """A notebook with these cells, open in a tab of its own; at the end its kernel is shut down."""
    server.write(name, cells, kernel)
    notebook = Notebook(window.new_page(), server, name).open()
    try:
        yield notebook
    finally:
        notebook.shut_down()
        notebook.page.close()


@contextmanager
def chromium() -> Iterator[Any]:
    """A Chromium without a window."""
    from playwright.sync_api import sync_playwright

    arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--disable-sync"]
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=browser_file(), args=arguments)
        try:
            yield browser
        finally:
            browser.close()
