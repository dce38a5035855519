"""Changes of launched functions that the notebook reads afterwards: a launched script keeps them, a notebook does not."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from accelerate_nb.export.rank_cells.bound_names import bound, mentioned
from accelerate_nb.export.rank_cells.name_usage import changes
from accelerate_nb.export.translated_cell import Remark

_Function: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef"
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LAUNCHERS = frozenset({"notebook_launcher", "debug_launcher"})


@dataclass(frozen=True, slots=True)
class _LaunchCall:
    """A call of `notebook_launcher`, and its position."""

    cell: int
    line: int
    function: str


@dataclass
class _LaunchFinder:
    """The statements of a notebook, one after the other."""

    functions: dict[str, _Function] = field(default_factory=dict)
    changed: dict[str, _LaunchCall] = field(default_factory=dict)
    read: dict[_LaunchCall, dict[str, int]] = field(default_factory=dict)

    def statement(self, cell: int, node: ast.stmt | ast.expr) -> None:
        if isinstance(node, _FUNCTIONS):
            self.functions[node.name] = node
            return
        for name in self._needed(node) & self.changed.keys():
            self.read.setdefault(self.changed.pop(name), {}).setdefault(name, cell)
        for name in bound([node]):
            self.changed.pop(name, None)
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] in _LAUNCHERS:
                self._launch(cell, call)

    def _launch(self, cell: int, call: ast.Call) -> None:
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        function = call.args[0] if call.args else keywords.get("function")
        handed = call.args[1] if len(call.args) > 1 else keywords.get("args")
        if isinstance(function, ast.Name) and function.id in self.functions:
            launch = _LaunchCall(cell, call.lineno, function.id)
            for name in _changed_by(self.functions[function.id], handed, self.functions):
                self.changed[name] = launch

    def _needed(self, node: ast.AST) -> set[str]:
        """The names that a statement reads, and those that the functions in it read."""
        waiting, known = list(mentioned(node)), set[str]()
        while waiting:
            name = waiting.pop()
            if name not in known:
                known.add(name)
                function = self.functions.get(name)
                waiting += mentioned(function) - _local_names(function) if function is not None else ()
        return known


def kept_changes(cells: Iterable[tuple[int, ast.Module]]) -> Iterator[tuple[int, Remark]]:
    """
    A remark, with the number of its cell, for each call of `notebook_launcher` whose changes are read again.

    The processes that a notebook starts have copies of its variables. Those of a launcher run the whole script, the function
    too, with the variables themselves.
    """
    followed = _LaunchFinder()
    for number, tree in cells:
        for node in _in_order(tree.body):
            followed.statement(number, node)
    for launch, names in followed.read.items():
        listed = ", ".join(f"`{name}`" for name in sorted(names))
        where = " and ".join(f"cell {number}" for number in sorted(set(names.values())))
        text = (
            f"`{launch.function}` changes {listed}, read again in {where}. Under accelerate-nb launch and torchrun the change "
            "stays, in a notebook only the processes see it: make it in the function, or return what is needed."
        )
        yield launch.cell, Remark(launch.line, text)


def _in_order(body: Sequence[ast.stmt]) -> Iterator[ast.stmt | ast.expr]:
    """Statements in the order in which they run, as far as is known: the body of a loop comes twice."""
    for node in body:
        inner = [part for name in ("body", "orelse", "finalbody") for part in getattr(node, name, ())]
        inner += [part for handler in getattr(node, "handlers", ()) for part in handler.body]
        if not inner or isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            yield node
            continue
        yield from (part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr))
        for _ in range(2 if isinstance(node, (ast.For, ast.AsyncFor, ast.While)) else 1):
            yield from _in_order(inner)


def _changed_by(function: _Function, handed: ast.expr | None, functions: Mapping[str, _Function]) -> set[str]:
    """The notebook's variables that a call changes: those that the function finds, and those that it is handed."""
    inside, found, known = [function], set[str](), set[str]()
    while inside:
        item = inside.pop()
        if item.name not in known:
            known.add(item.name)
            found |= changes(item) - _local_names(item)
            inside += [functions[name] for name in mentioned(item) - _local_names(item) if name in functions]
    parameters = [*function.args.posonlyargs, *function.args.args]
    values = handed.elts if isinstance(handed, (ast.Tuple, ast.List)) else ()
    changed = changes(function)
    return found | {
        value.id
        for value, parameter in zip(values, parameters, strict=False)
        if isinstance(value, ast.Name) and parameter.arg in changed
    }


def _local_names(function: _Function) -> set[str]:
    """The function's own variables."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    stated = {name for part in ast.walk(function) if isinstance(part, ast.Global) for name in part.names}
    return ({item.arg for item in every if item is not None} | bound(function.body)) - stated
