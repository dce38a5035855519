"""Magics that IPython itself runs, in the names of the script."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from IPython.core import page
from IPython.core.builtin_trap import BuiltinTrap
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell


class ScriptShell(InteractiveShell):
    """IPython without a front end: Python's prompts, main module and search path stay, and errors are raised."""

    def init_builtins(self) -> None:
        """Leave `display`, and the mark by which libraries know a notebook, to the script."""
        self.builtin_trap = BuiltinTrap(shell=self)

    def _init_nothing(self, *_: Any) -> None:
        """Leave Python as it is."""

    init_prompts = init_sys_modules = init_virtualenv = enable_gui = _init_nothing

    def safe_execfile_ipy(self, fname: str, shell_futures: bool = False, raise_exceptions: bool = True) -> None:
        """Run a notebook as the script that it is."""
        if not fname.endswith(".ipynb"):
            super().safe_execfile_ipy(fname, shell_futures, raise_exceptions)  # type: ignore[no-untyped-call] # IPython's own
            return
        from accelerate_nb.export.notebook import read
        from accelerate_nb.export.script import as_script

        exec(compile(as_script(read(Path(fname))).text, fname, "exec"), self.user_ns)

    def showtraceback(self, *_: Any, **__: Any) -> None:
        """Raise the error that IPython would show before it goes on."""
        raise  # noqa: PLE0704 - IPython calls this while it handles an error


def line_magic(name: str, text: str, names: dict[str, Any]) -> Any:
    """
    Run a line magic as a notebook does; `names` are the script's.

    >>> line_magic("alias", "hello echo hello", globals())
    """
    with shell_of(names) as shell:
        # `{name}` is looked up where the script calls this, two frames up
        return shell.run_line_magic(name, text, _stack_depth=2)


def cell_magic(name: str, text: str, cell: str, names: dict[str, Any]) -> Any:
    """
    Run a cell magic, with the text of its own line and the lines below it; `names` are the script's.

    >>> cell_magic("timeit", "-n 1 -r 1 -q", "sum(range(10))", globals())
    """
    with shell_of(names) as shell:
        return shell.run_cell_magic(name, text, cell if cell.endswith("\n") else f"{cell}\n")


@contextmanager
def shell_of(names: dict[str, Any]) -> Iterator[Any]:
    """The shell of this script, with these names, which `get_ipython` gives until the end of the block."""
    shell, other = _shell(), InteractiveShell._instance
    kept = shell.user_module, shell.user_ns
    for history in ("_ih", "_oh", "_dh"):
        names.setdefault(history, shell.user_ns[history])
    try:
        InteractiveShell._instance = shell
        shell.user_module, shell.user_ns = shell.prepare_user_module(None, names)
        yield shell
    finally:
        shell.user_module, shell.user_ns = kept
        InteractiveShell._instance = other


@cache
def _shell() -> Any:
    from traitlets.config import Config

    shell: Any = ScriptShell(config=Config({"HistoryManager": {"enabled": False}}))  # type: ignore[no-untyped-call] # IPython's own
    # nobody turns the pages of a script
    shell.set_hook("show_in_pager", page.as_hook(page.display_page), 90)  # type: ignore[no-untyped-call] # IPython's own
    # every front end has `%store`, and the result of a cell, at which `%xdel` looks
    shell.extension_manager.load_extension("storemagic")
    shell.last_execution_result = ExecutionResult(None)  # type: ignore[no-untyped-call] # IPython's own
    return shell
