"""Names that a statement reads, binds and changes, as Python's own compiler sees it."""

from __future__ import annotations

import ast
import dis
import warnings
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from types import CodeType

# Methods that change their object, in addition to those whose names end in `_`, as in torch.
_CHANGES = frozenset({
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "remove",
    "reverse", "rotate", "setdefault", "sort", "update",
    "fill", "partition", "resize",
    "add_module", "backward", "eval", "load_state_dict", "named_parameters", "parameters", "register_buffer",
    "register_module", "register_parameter", "step", "train", "zero_grad",
})  # fmt: skip

_OF_CLASSES = frozenset({"__name__", "__module__", "__qualname__"})
# Code that is a function to the compiler and runs at its own position; the last is what has the `T` of `class Stack[T]`.
_AT_ONCE = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<generic parameters of ")


@dataclass(frozen=True, slots=True)
class NameUsage:
    """
    The use of the module's names by a statement.

    `deferred` and `written_in_functions` are read and changed when a function that it makes is called; `key` is equal for statements
    that bind the same thing wherever they stand.
    """

    read: frozenset[str] = frozenset()
    bound: frozenset[str] = frozenset()
    deleted: frozenset[str] = frozenset()
    changed: frozenset[str] = frozenset()
    deferred: frozenset[str] = frozenset()
    written_in_functions: frozenset[str] = frozenset()
    everything: bool = False  # `from x import *`
    keys: tuple[tuple[str, Hashable], ...] = field(default=())

    def key(self, name: str) -> Hashable:
        """A key that is equal where the name is bound to the same thing; None where that is unknown."""
        return dict(self.keys).get(name)


def usage_of(node: ast.stmt | ast.expr) -> NameUsage:
    """
    The use of names by a simple statement, a definition or an expression.

    >>> sorted(usage_of(ast.parse("y = [x * z for x in data]").body[0]).read)
    ['data', 'z']
    """
    statement = ast.copy_location(ast.Expr(node), node) if isinstance(node, ast.expr) else node
    code = _compiled(statement)
    if code is None:
        return NameUsage()
    used = _UsageVisitor()
    used.take(code, inside=False)
    defines = isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    changed = frozenset(_changed(statement))
    return NameUsage(
        # what a lambda of a call reads may be read at once
        read=frozenset(used.read if defines else used.read | used.deferred),
        bound=frozenset(used.bound),
        deleted=frozenset(used.deleted),
        changed=frozenset() if defines else changed,
        deferred=frozenset(used.deferred),
        written_in_functions=frozenset(used.written_in_functions | (changed & used.deferred)),
        everything=isinstance(statement, ast.ImportFrom) and any(alias.name == "*" for alias in statement.names),
        keys=tuple(_keys(statement)),
    )


@dataclass
class _UsageVisitor:
    """The names in a statement's code, and in that of its functions."""

    read: set[str] = field(default_factory=set)
    bound: set[str] = field(default_factory=set)
    deleted: set[str] = field(default_factory=set)
    deferred: set[str] = field(default_factory=set)
    written_in_functions: set[str] = field(default_factory=set)

    def take(self, code: CodeType, *, inside: bool) -> None:
        for step in dis.get_instructions(code):
            action, _, suffix = step.opname.partition("_")
            if not isinstance(step.argval, str) or not suffix.endswith(("NAME", "GLOBAL", "GLOBALS")):
                continue
            self._record(action, step.argval, inside=inside)
        for part in code.co_consts:
            if isinstance(part, CodeType):
                self._take_part(part, inside=inside)

    def _record(self, action: str, name: str, *, inside: bool) -> None:
        if action == "LOAD":
            (self.deferred if inside else self.read).add(name)
        elif action == "STORE":
            (self.written_in_functions if inside else self.bound).add(name)
        elif action == "DELETE" and not inside:
            self.deleted.add(name)

    def _take_part(self, code: CodeType, *, inside: bool) -> None:
        # functions have the flag, and the bodies of classes have not
        if code.co_flags & 0x02:
            self.take(code, inside=inside or not code.co_name.startswith(_AT_ONCE))
            return
        within = _UsageVisitor()
        within.take(code, inside=False)
        # what the body of a class binds is its own
        (self.deferred if inside else self.read).update(within.read - within.bound - _OF_CLASSES)
        self.deferred |= within.deferred
        self.written_in_functions |= within.written_in_functions


def _compiled(statement: ast.stmt) -> CodeType | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of the same things when the script runs
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            code: CodeType = compile(ast.Module([statement], []), "<cell>", "exec", flags, dont_inherit=True)
            return code
    except (SyntaxError, ValueError):
        return None  # a `break` by itself, which names nothing


def _changed(node: ast.AST) -> Iterator[str]:
    """The names of objects that a statement changes as they are."""
    for part in ast.walk(node):
        if isinstance(part, (ast.Attribute, ast.Subscript)) and not isinstance(part.ctx, ast.Load):
            yield from _base(part)
        elif isinstance(part, ast.Call):
            yield from _changed_by(part)


def _changed_by(call: ast.Call) -> Iterator[str]:
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if method in _CHANGES or (method.endswith("_") and not method.startswith("_")):
        yield from _base(call.func)
        if method.endswith("_") and call.args:
            yield from _base(call.args[0])  # torch.nn.init.zeros_(layer.weight)
    elif isinstance(call.func, ast.Name) and call.func.id in {"next", "setattr", "delattr"} and call.args:
        yield from _base(call.args[0])


def _base(node: ast.AST) -> Iterator[str]:
    """The name at which a chain such as `model.layers[0].weight` begins."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    if isinstance(node, ast.Name):
        yield node.id


def _keys(node: ast.stmt) -> Iterator[tuple[str, Hashable]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            top = alias.name if alias.asname else alias.name.partition(".")[0]
            yield alias.asname or top, ("import", top)
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            yield alias.asname or alias.name, ("from", node.level, node.module, alias.name)
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name, ("definition", ast.dump(node))


def changes(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """The names, its own or not, of what a function changes when it is called."""
    found = {name for part in ast.walk(function) if isinstance(part, ast.Global) for name in part.names}
    for part in ast.walk(function):
        method = part.func.attr if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) else ""
        is_written = isinstance(part, (ast.Attribute, ast.Subscript)) and not isinstance(part.ctx, ast.Load)
        if is_written or method in _CHANGES or (method.endswith("_") and not method.endswith("__")):
            found.update(_base(part))
    return found
