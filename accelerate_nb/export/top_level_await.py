"""`await` outside of a function, which a notebook allows: such statements become a function that the script waits for."""

from __future__ import annotations

import ast
import inspect
import warnings
from collections.abc import Iterator, Sequence

from accelerate_nb.export.edits import Edit, edited, end_of, instead_of
from accelerate_nb.export.names import bound

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


def globals_of(nodes: Sequence[ast.stmt]) -> tuple[str, ...]:
    """The names that a function of these statements has to declare global, to assign the names of the script."""
    return tuple(sorted(bound(nodes)))


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
