"""IPython as a script has it: no front end, the script's own names and lines, and errors that are raised."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from IPython.core import page
from IPython.core.builtin_trap import BuiltinTrap
from IPython.core.compilerop import CachingCompiler
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from IPython.utils.text import DollarFormatter
from traitlets import Type
from traitlets.config import Config

from accelerate_nb.export.python_source import CODE_MAGICS
from accelerate_nb.script.cells import wait
from accelerate_nb.script.ranks import system


class ScriptCompiler(CachingCompiler):
    """Compiles the code below a magic as what it is, lines of the script."""

    file: str | None = None

    def __call__(self, source: Any, filename: str, symbol: str, *flags: Any) -> Any:
        """The code."""
        return super().__call__(source, self.file or filename, symbol, *flags)


class ScriptShell(InteractiveShell):
    """IPython without a front end: Python's prompts, main module and search path stay, and errors are raised."""

    compiler_class = Type(ScriptCompiler)
    # The line of the script that calls.
    frame: FrameType = sys._getframe()

    def init_builtins(self) -> None:
        """Leave `display`, and the mark by which libraries know a notebook, to the script."""
        self.builtin_trap = BuiltinTrap(shell=self)

    def _init_nothing(self, *_: Any) -> None:
        """Leave Python as it is."""

    init_prompts = init_sys_modules = init_virtualenv = enable_gui = _init_nothing

    def run_cell_magic(self, magic_name: str, line: str, cell: str) -> Any:
        """Run a cell magic; code below it is at its lines in the script."""
        compiler: Any = self.compile
        kept = compiler.file
        if magic_name in CODE_MAGICS:
            # comments take the places of the script's lines above
            compiler.file, cell = self.frame.f_code.co_filename, "#\n" * self.frame.f_lineno + cell
        try:
            # as a cell of a notebook has it, so that what captures values is not replaced by the code's own trap
            with self.display_trap:
                return super().run_cell_magic(magic_name, line, cell)  # type: ignore[no-untyped-call] # IPython's own
        finally:
            compiler.file = kept

    def run_cell(self, *arguments: Any, **options: Any) -> Any:
        """Run the code that a magic has been given, and raise what it raises."""
        outcome: Any = super().run_cell(*arguments, **options)  # type: ignore[no-untyped-call] # IPython's own
        outcome.raise_error()
        return outcome

    def get_local_scope(self, stack_depth: int) -> Mapping[str, Any]:
        """The names where the script calls."""
        return self.frame.f_locals

    def var_expand(self, cmd: str, depth: int = 0, formatter: Any = None) -> str:
        """A text with `{expression}` and `$name` replaced by values of the script; as it is, if one of them has none."""
        with suppress(Exception):  # as IPython does, whatever the text raises
            return str(DollarFormatter().vformat(cmd, (), {**self.user_ns, **self.frame.f_locals}))
        return cmd

    def system(self, cmd: str) -> None:
        """Run a command of a magic as `!command` of the script does."""
        system(self.var_expand(cmd), self.frame)

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


@cache
def _script_shell() -> Any:
    """The shell of this script."""
    shell: Any = ScriptShell(config=Config({"HistoryManager": {"enabled": False}}))  # type: ignore[no-untyped-call] # IPython's own
    # nobody turns the pages of a script
    shell.set_hook("show_in_pager", page.as_hook(page.display_page), 90)  # type: ignore[no-untyped-call] # IPython's own
    # every front end has `%store`, and the result of a cell, at which `%xdel` looks
    shell.extension_manager.load_extension("IPython.extensions.storemagic")
    shell.last_execution_result = ExecutionResult(None)  # type: ignore[no-untyped-call] # IPython's own
    shell.loop_runner = wait
    return shell


@contextmanager
def shell_at(frame: FrameType) -> Iterator[Any]:
    """The shell of this script, with the names of a frame, which `get_ipython` gives until the end of the block."""
    shell, other = _script_shell(), InteractiveShell._instance
    kept = shell.user_module, shell.user_ns, shell.frame
    names = frame.f_globals
    for history, first in (("_ih", [""]), ("_oh", {}), ("_dh", [Path.cwd()])):
        names.setdefault(history, first)
    try:
        InteractiveShell._instance = shell
        shell.user_module, shell.user_ns = shell.prepare_user_module(None, names)
        shell.frame = frame
        yield shell
    finally:
        shell.user_module, shell.user_ns, shell.frame = kept
        InteractiveShell._instance = other
