"""No module keeps state: what changes while a program runs is in an object, or in a `ContextVar`."""

import ast
from collections.abc import Iterator

from tests.style.source_files import modules

CONTAINERS = {"dict", "list", "set", "defaultdict", "OrderedDict", "Counter", "deque", "WeakKeyDictionary", "WeakSet"}
CHANGES = {"append", "add", "update", "setdefault", "pop", "popitem", "clear", "extend", "insert", "remove", "discard"}


def state(tree: ast.Module) -> Iterator[str]:
    """Module-level containers that a function changes, and names that a function makes global."""
    kept = {name for node in tree.body for name in assigned_containers(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield f"line {node.lineno}: global {', '.join(node.names)}"
    for function in (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))):
        for name, line in changed(function):
            if name in kept:
                yield f"line {line}: {function.name} changes {name}"


def assigned_containers(node: ast.stmt) -> Iterator[str]:
    """The names that a statement binds to a container that can change."""
    if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
        return
    value = node.value
    called = value.func if isinstance(value, ast.Call) else None
    named = called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else None
    if isinstance(value, (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)) or named in CONTAINERS:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def changed(function: ast.AST) -> Iterator[tuple[str, int]]:
    """The names whose contents a function changes."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            owner: ast.expr = node.func.value
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
            owner = node.value
        else:
            continue
        if isinstance(owner, ast.Name):
            yield owner.id, node.lineno


def test_no_module_keeps_state() -> None:
    assert [f"{module.name}: {found}" for module in modules() for found in state(module.tree)] == []
