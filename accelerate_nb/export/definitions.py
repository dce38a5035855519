"""Search for statements that only define: a process that imports the script needs them, and may run them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from accelerate_nb.export.names import bound, called, looked_up, mentioned

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
