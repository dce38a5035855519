"""The code of a cell that goes to every rank: whether it is Python, and how it runs in the notebook too."""

import ast
import warnings
from contextlib import suppress
from dataclasses import dataclass
from inspect import CO_COROUTINE
from itertools import chain, repeat
from types import CodeType
from typing import Any

from accelerate_nb.errors import ConfigurationError, LaunchError, WorkerError
from accelerate_nb.sources.cells import kept_numbers
from accelerate_nb.transport.serializer import global_names

# The line with the magic is above the code.
FIRST_LINE = 2
# What a rank has of its own.
_OF_RANKS = frozenset({"accelerator", "rank", "world_size", "device"})


@dataclass(frozen=True)
class CellCode:
    """A cell's text under the magic's line, in the shell in which it was written."""

    shell: Any
    text: str

    @property
    def number(self) -> int:
        """The number that the notebook shows beside the cell."""
        # IPython's `execution_count` is one ahead while a cell runs in some versions
        return len(self.shell.user_ns.get("In", [""])) - 1

    def check(self) -> None:
        """Raise what IPython shows of a cell that is not Python, with the lines of the whole cell."""
        try:
            self._compiled()
        except SyntaxError as error:
            lines = self.shell.SyntaxTB.structured_traceback(type(error), error, [])
            raise shown_as(LaunchError(f"{error.msg} (line {error.lineno})"), lines) from None

    def run_locally(self) -> None:
        """Run it in the notebook, with the value of its last expression shown."""
        __tracebackhide__ = True
        name, code = self._compiled()
        if any(part.co_flags & CO_COROUTINE for part in code):
            raise ConfigurationError(
                "--local was given for a cell that awaits something outside of functions. Leave the flag or the await out."
            )
        try:
            for part in code:
                exec(part, self.shell.user_global_ns, self.shell.user_ns)
        except BaseException as error:
            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_code.co_filename != name:
                trace = trace.tb_next
            lines = self.shell.InteractiveTB.structured_traceback(type(error), error, trace, tb_offset=0)
            shown_as(error, [*lines, "", "It failed in the notebook, and was not run on the ranks."])
            raise

    def filename(self) -> str:
        """The name of the file under which the shell knows the code's lines."""
        return self._compiled()[0]

    def values(self) -> dict[str, Any]:
        """The notebook's variables that the code names, but for those that every rank has of its own."""
        _, code = self._compiled()
        names = set().union(*map(global_names, code)) - _OF_RANKS
        known, hidden = self.shell.user_ns, self.shell.user_ns_hidden
        return {name: known[name] for name in sorted(names) if name in known and name not in hidden}

    def _compiled(self) -> tuple[str, tuple[CodeType, ...]]:
        """The name of the cell's file, and its code: the last expression apart, so that its value is shown."""
        above = FIRST_LINE - 1 + len(self.text) - len(self.text.lstrip("\n"))
        # IPython's own transformation drops the empty lines at the top
        source = "\n" * above + self.shell.transform_cell(self.text)
        name = self.shell.compile.cache(source, self.number, raw_code=source)
        kept_numbers(self.shell)[name] = self.number  # as IPython 8 does by itself
        flags = self.shell.compile.flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        with warnings.catch_warnings():
            # the ranks will warn of what is doubtful in it
            warnings.simplefilter("ignore")
            compile(source, name, "exec", flags)
            tree = ast.parse(source)
            if not tree.body or not isinstance(tree.body[-1], ast.Expr):
                return name, (compile(tree, name, "exec", flags),)
            *statements, last = tree.body
            rest = compile(ast.Module(statements, tree.type_ignores), name, "exec", flags)
            return name, (rest, compile(ast.Interactive([last]), name, "single", flags))


def shown_as(error: BaseException, lines: list[str]) -> BaseException:
    """The same error, of which the notebook shows these lines; one that a panel shows, in a line under that the first time."""
    first = [line] if isinstance(error, WorkerError) and (line := error.line_under_panel()) is not None else []
    shown = chain(first, repeat(lines))
    with suppress(AttributeError):
        # IPython calls it (`InteractiveShell.showtraceback`); a worker's class may refuse plain assignment
        object.__setattr__(error, "_render_traceback_", lambda: next(shown))
    return error
