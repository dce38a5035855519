"""IPython as a script has it: no front end, the script's own names and lines, and errors that are raised."""

import ast
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from IPython.core import page
from IPython.core.builtin_trap import BuiltinTrap
from IPython.core.compilerop import CachingCompiler
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from traitlets import Type
from traitlets.config import Config

from accelerate_nb.script.commands import expanded, system
from accelerate_nb.script.top_level_await import wait

# Magics below whose line stands code of the script.
_OF_CODE = frozenset({"time", "capture"})


class ScriptCompiler(CachingCompiler):
    """Compiles the code below a magic as what it is, lines of the script."""

    file: str | None = None
    above = 0

    def ast_parse(self, source: str, filename: str = "<unknown>", symbol: str = "exec") -> Any:
        """The statements, at their lines in the script."""
        tree: Any = super().ast_parse(source, filename, symbol)
        return ast.increment_lineno(tree, self.above)

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
        kept = compiler.file, compiler.above
        if magic_name in _OF_CODE:
            compiler.file, compiler.above = self.frame.f_code.co_filename, self.frame.f_lineno
        try:
            # as a cell of a notebook has it, so that what captures values is not replaced by the code's own trap
            with self.display_trap:
                return super().run_cell_magic(magic_name, line, cell)  # type: ignore[no-untyped-call] # IPython's own
        finally:
            compiler.file, compiler.above = kept

    def run_cell(self, *arguments: Any, **options: Any) -> Any:
        """Run the code that a magic has been given, and raise what it raises."""
        outcome: Any = super().run_cell(*arguments, **options)  # type: ignore[no-untyped-call] # IPython's own
        outcome.raise_error()
        return outcome

    def get_local_scope(self, stack_depth: int) -> Mapping[str, Any]:
        """The names where the script calls."""
        return self.frame.f_locals

    def var_expand(self, cmd: str, depth: int = 0, formatter: Any = None) -> str:
        """A text with `{expression}` and `$name` replaced by values of the script."""
        return expanded(cmd, {**self.user_ns, **self.frame.f_locals})

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
def script_shell() -> Any:
    """The shell of this script."""
    shell: Any = ScriptShell(config=Config({"HistoryManager": {"enabled": False}}))  # type: ignore[no-untyped-call] # IPython's own
    # nobody turns the pages of a script
    shell.set_hook("show_in_pager", page.as_hook(page.display_page), 90)  # type: ignore[no-untyped-call] # IPython's own
    # every front end has `%store`, and the result of a cell, at which `%xdel` looks
    shell.extension_manager.load_extension("storemagic")
    shell.last_execution_result = ExecutionResult(None)  # type: ignore[no-untyped-call] # IPython's own
    shell.loop_runner = wait
    return shell
