"""A cell's lines as they stand in a script: what it does is guarded, so that other processes can import what it defines."""

from __future__ import annotations

import ast
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, zip_longest

from accelerate_nb.export.python_source import (
    Edit,
    begin_inside,
    bound,
    called,
    edited,
    end_inside,
    end_of,
    instead_of,
    looked_up,
    mentioned,
)
from accelerate_nb.sources.cells import added, kept

_DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Global, ast.Pass)
# Calls that make a value of what they are given, and do nothing else.
_MAKERS = frozenset(
    f"{home}{name}"
    for homes, names in (
        (("", "typing."), ("TypeVar", "ParamSpec", "TypeVarTuple", "NewType", "NamedTuple", "TypedDict")),
        (("", "collections."), ("namedtuple", "OrderedDict", "defaultdict", "Counter", "deque")),
        (("", "pathlib."), ("Path", "PurePath")),
        (("", "functools."), ("partial",)),
        (("logging.",), ("getLogger",)),
        (("torch.",), ("device",)),
        (("re.",), ("compile",)),
        (("os.",), ("getenv", "environ.get", "path.join", "path.expanduser")),
        (("",), ("dict", "list", "tuple", "set", "frozenset", "range", "len", "int", "float", "str", "bool")),
    )
    for home in homes
    for name in names
)
_WORK = (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass
class DefinitionFinder:
    """
    Decides, for one statement after the other, whether it only defines.

    A definition that needs what only a guarded statement computes (`class Net(Base): size = len(vocabulary)`) can't be
    run by a process that merely imports the script, so it is guarded as well.
    """

    guarded: set[str] = field(default_factory=set)
    _inside: dict[str, set[str]] = field(default_factory=dict)

    def only_define(self, nodes: Sequence[ast.stmt], *, shown: ast.stmt | None = None) -> bool:
        """Whether these statements, which stand on the same lines, all define; they are remembered."""
        needed = looked_up(nodes) | set(self._within(called(nodes)))
        defines = all(node is not shown and _defines(node) for node in nodes) and self.guarded.isdisjoint(needed)
        names = bound(nodes)
        self.guarded = self.guarded - names if defines else self.guarded | names
        for node in nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                self._inside[node.name] = mentioned(node)
        return defines

    def define_again(self, nodes: Iterable[ast.stmt]) -> None:
        """These statements are run for everyone after all."""
        self.guarded -= bound(nodes)

    def _within(self, names: Iterable[str]) -> Iterator[str]:
        """The names that these functions, and the functions that they call, look up when they are called."""
        waiting, known = list(names), set[str]()
        while waiting:
            name = waiting.pop()
            if name not in known:
                known.add(name)
                yield from self._inside.get(name, ())
                waiting += self._inside.get(name, ())


def _defines(node: ast.stmt) -> bool:
    if isinstance(node, _DEFINITIONS) or type(node).__name__ == "TypeAlias":
        return True
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return all(map(_is_name, targets)) and (node.value is None or _is_at_hand(node.value))
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.If):
        is_guard = any(isinstance(part, ast.Name) and part.id == "__name__" for part in ast.walk(node.test))
        return _is_at_hand(node.test) and not is_guard and _all_define(node.body, node.orelse)
    if isinstance(node, ast.Try):
        handlers = [handler.body for handler in node.handlers]
        return _all_define(node.body, *handlers, node.orelse, node.finalbody)
    return False


def _all_define(*bodies: Sequence[ast.stmt]) -> bool:
    return all(_defines(node) for body in bodies for node in body)


def _is_name(target: ast.expr) -> bool:
    if isinstance(target, (ast.Tuple, ast.List)):
        return all(map(_is_name, target.elts))
    return isinstance(target, ast.Name)


def _is_at_hand(value: ast.expr) -> bool:
    """Whether a value takes no work to make."""
    return not any(
        isinstance(part, _WORK) or (isinstance(part, ast.Call) and ast.unparse(part.func) not in _MAKERS)
        for part in _parts(value)
    )


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    children = node.args.defaults if isinstance(node, ast.Lambda) else ast.iter_child_nodes(node)
    for child in children:
        yield from _parts(child)


# They need a loop that runs, which a notebook always has.
_NEEDS_LOOP = frozenset({"create_task", "ensure_future", "get_running_loop"})


def is_async(nodes: Sequence[ast.stmt]) -> bool:
    """
    Whether these statements can only run where a loop does.

    >>> is_async(ast.parse("results = [result async for result in stream()]").body)
    True
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of the same things when the script runs
        code = compile(ast.Module(list(nodes), []), "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    return bool(code.co_flags & inspect.CO_COROUTINE) or any(part in _NEEDS_LOOP for part in _called(nodes))


def without_annotations(source: str) -> str:
    """An asynchronous cell that annotates no variables: what a function declares global can't be annotated in it."""
    body = ast.parse(source).body
    if not any(is_async([node]) for node in body):
        return source
    lines = source.split("\n")
    return edited(source, [edit for node in body for edit in _unannotated(node, lines)])


def _unannotated(node: ast.AST, lines: Sequence[str]) -> Iterator[Edit]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
        return
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield _plain_assignment(node, node.target, lines)
    for child in ast.iter_child_nodes(node):
        yield from _unannotated(child, lines)


def _plain_assignment(node: ast.AnnAssign, target: ast.Name, lines: Sequence[str]) -> Edit:
    if node.value is None:
        return instead_of(node, "pass")
    line, column = end_of(node.annotation)
    while (sign := lines[line - 1].encode().find(b"=", column)) < 0:
        line, column = line + 1, 0
    return Edit(end_of(target), (line, sign), " " + "\\\n" * (line - target.lineno))


def _called(nodes: Sequence[ast.stmt]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        for part in ast.walk(node):
            if isinstance(part, ast.Call):
                yield ast.unparse(part.func).rpartition(".")[2]


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
    parts = list(_groups(body, definitions, body[-1] if shown and body else None))
    for defines, group in groupby(parts, key=lambda part: part.defines):
        run = list(group)
        if defines:
            layout.as_they_are(run[-1].last)
        else:
            layout.guarded(run)
    layout.as_they_are(len(layout.lines))
    return layout.written


def _groups(
    body: Sequence[ast.stmt], definitions: DefinitionFinder, shown: ast.stmt | None
) -> Iterator[StatementGroup]:
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
        # it assigns names of the script
        if names := bound(nodes):
            self.written.append(added(f"{INDENT}global {', '.join(sorted(names))}"))
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
