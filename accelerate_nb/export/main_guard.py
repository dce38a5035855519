"""A cell's lines as they stand in a script: what it does is guarded, so that other processes can import what it defines."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest

from accelerate_nb.export.definitions import DefinitionFinder
from accelerate_nb.export.edits import begin_inside, end_inside, end_of
from accelerate_nb.export.top_level_await import globals_of, is_async
from accelerate_nb.sources.script_lines import added, kept

GUARD = 'if __name__ == "__main__":'
INDENT = "    "


@dataclass(frozen=True, slots=True)
class StatementGroup:
    """Statements that share lines; lines count from 1, and decorators belong to what they decorate."""

    nodes: tuple[ast.stmt, ...]
    first: int
    last: int
    defines: bool = False

    def repeated(self) -> list[ast.stmt]:
        """Imports that share a line with what is guarded, and that definitions may need."""
        imports = [node for node in self.nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
        return [] if self.defines else list(imports)


def guarded(
    source: str, number: int, definitions: DefinitionFinder, waits: Callable[[], str], *, shown: bool = False
) -> list[str]:
    r"""
    The lines of a script for a cell's source.

    `waits` gives the name of the function that waits, where one is needed. `shown` means that the cell's last statement shows
    something, even if it is a constant.

    >>> guarded("x = 1\\nprint(x)", 1, DefinitionFinder(), lambda: "wait")
    ['x = 1', 'if __name__ == "__main__":  # +', '    print(x)']
    """
    layout = _ScriptLayout(source, number, waits)
    body = layout.tree.body
    parts = list(_parts(body, definitions, body[-1] if shown and body else None))
    for defines, group in groupby(parts, key=lambda part: part.defines):
        run = list(group)
        if defines:
            layout.as_they_are(run[-1].last)
        else:
            layout.guarded(run)
    layout.as_they_are(len(layout.lines))
    return layout.written


def _parts(body: Sequence[ast.stmt], definitions: DefinitionFinder, shown: ast.stmt | None) -> Iterator[StatementGroup]:
    together: list[ast.stmt] = []
    for node, following in zip_longest(body, body[1:]):
        together.append(node)
        last = end_of(node)[0]
        if following is None or _first(following) > last:
            defines = definitions.only_define(together, shown=shown)
            part = StatementGroup(tuple(together), _first(together[0]), last, defines)
            if repeated := part.repeated():
                definitions.define_again(repeated)
            yield part
            together = []


def _first(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


class _ScriptLayout:
    """The lines of one cell, written one run of statements after the other."""

    def __init__(self, source: str, number: int, waits: Callable[[], str]) -> None:
        self.tree = ast.parse(source)
        self.lines = source.split("\n")
        self.written: list[str] = []
        self._number = number
        self._waits = waits
        self._done = 0
        self._functions = 0
        self._begin_in_text, self._end_in_text = begin_inside(self.tree), end_inside(self.tree)

    def as_they_are(self, last: int) -> None:
        """Write the lines up to `last`."""
        self._write(last, "")

    def guarded(self, run: Sequence[StatementGroup]) -> None:
        """Write statements, with the comments right above them, below a guard."""
        self.as_they_are(self._before_comments(run[0].first))
        nodes = [node for part in run for node in part.nodes]
        for part in run:
            self.written += [added(ast.unparse(node)) for node in part.repeated()]
        if not is_async(nodes):
            self.written.append(added(GUARD))
            self._write(run[-1].last, INDENT)
            return
        self._functions += 1
        function = f"_cell_{self._number}" + (f"_{self._functions}" if self._functions > 1 else "")
        self.written.append(added(f"async def {function}():"))
        if names := globals_of(nodes):
            self.written.append(added(f"{INDENT}global {', '.join(names)}"))
        self._write(run[-1].last, INDENT)
        self.written += [added(GUARD), added(f"{INDENT}{self._waits()}({function}())")]

    def _before_comments(self, first: int) -> int:
        line = first - 1
        while line > self._done and self.lines[line - 1].lstrip().startswith("#"):
            line -= 1
        return line

    def _write(self, last: int, indent: str) -> None:
        for line in range(self._done + 1, last + 1):
            text = self.lines[line - 1]
            if text.strip() and line not in self._begin_in_text:
                text = indent + text
            self.written.append(text if line in self._end_in_text else kept(text))
        self._done = max(self._done, last)
