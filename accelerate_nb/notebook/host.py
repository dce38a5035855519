"""The host of this process: a Jupyter kernel, IPython in a terminal, or a plain script."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath
from typing import Any, Literal, TypeAlias

import psutil

from accelerate_nb.notebook.display.text import standard_sink
from accelerate_nb.notebook.display.text_output import CellSink, TextSink
from accelerate_nb.sources.cells import ipython_shell

Service: TypeAlias = Literal["colab", "kaggle", "vscode"]
Reader: TypeAlias = Literal["page", "file", "console"]

# What executes a notebook to write it to a file, and what shows a kernel in a window of text.
_EXECUTORS = frozenset(
    {"jcache", "nbclient", "nbconvert", "nbval", "papermill", "ploomber", "quarto", "sphinx-build", "testbook"}
    | {f"jupyter-{name}" for name in ("book", "cache", "execute", "nbconvert", "run")}
)
_CONSOLES = {"jupyter-console", "jupyter_console", "jupyter-qtconsole", "qtconsole", "spyder"}
_FIRST_WORDS = 4


@dataclass(frozen=True, slots=True)
class NotebookHost:
    """Facts of the host: `service` shows the notebook where no Jupyter server does; `reader` is where the kernel's output goes."""

    kind: Literal["jupyter", "ipython", "script"]
    service: Service | None
    screen: Callable[[], TextSink]
    reader: Reader = "console"


def host(environment: Mapping[str, str]) -> NotebookHost:
    """The host of this process, found without importing anything."""
    shell = ipython_shell()
    service = _service(shell, environment)
    if getattr(shell, "kernel", None) is not None:
        return NotebookHost("jupyter", service, CellSink, _reader(shell, environment))
    return NotebookHost("script" if shell is None else "ipython", service, standard_sink)


def _service(shell: Any, environment: Mapping[str, str]) -> Service | None:
    if type(shell).__module__.startswith("google.colab"):
        return "colab"
    # KAGGLE_USERNAME and KAGGLE_KEY are credentials, which people set everywhere
    if "KAGGLE_KERNEL_RUN_TYPE" in environment:
        return "kaggle"
    # VS Code's own kernels inherit the first, its notebooks have the second; its terminals have neither
    is_vscode = "VSCODE_PID" in environment or "__vsc_ipynb_file__" in getattr(shell, "user_ns", {})
    return "vscode" if is_vscode and getattr(shell, "kernel", None) is not None else None


def _reader(shell: Any, environment: Mapping[str, str]) -> Reader:
    if type(shell).__module__.startswith("spyder_kernels"):
        return "console"
    try:
        # jupyter_client names the process that starts a kernel
        command = psutil.Process(int(environment.get("JPY_PARENT_PID", ""))).cmdline()
    except (ValueError, OverflowError, psutil.Error):
        command = []
    return reader_of(command)


def reader_of(command: Sequence[str]) -> Reader:
    """The reader of a kernel's output, from the command line of its process; an unknown one may well show a page."""
    words = [PurePath(word).name.removesuffix(".py").removesuffix(".exe") for word in command[:_FIRST_WORDS]]
    # `jupyter nbconvert` calls `jupyter-nbconvert`, and stays beside it where processes can't become others
    called = {*words, *(f"jupyter-{second}" for first, second in pairwise(words) if first == "jupyter")}
    if called & _CONSOLES:
        return "console"
    # this package's own command may start the kernel; further words may be a folder's, which many call so
    is_ours = "accelerate-nb" in words[:2] or ("-m", "accelerate_nb") in pairwise(words)
    return "file" if called & _EXECUTORS or is_ours else "page"
