"""Switches of a script between the notebook's random numbers and the ranks'."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, TypeAlias

Whose: TypeAlias = Literal["notebook", "ranks", "both"]

# Calls that draw nothing; those of the script's own values may have a `_` before them.
_DRAWS_NOTHING = frozenset(
    {"print", "len", "round", "range", "str", "int", "float", "bool", "abs", "sum", "min", "max", "repr", "format"}
    | {"isinstance", "type", "display", "shown", "push", "pull", "pull_from", "session_begins"}
)
_UNKNOWN = (ast.For, ast.AsyncFor, ast.comprehension, ast.With, ast.AsyncWith, ast.Await)


def turns(cells: Mapping[int, ast.Module], ranks: Mapping[int, Whose], first: int) -> dict[int, Whose]:
    """
    The owner of the random numbers from a cell on, by its number, where that changes.

    `cells` are all of them in their order, `ranks` those on ranks; the session begins with, or in, the cell `first`. A script
    where the notebook draws nothing below has one stream of numbers, and needs no switch.
    """
    below = {number: tree for number, tree in cells.items() if number >= first}
    if not ranks or not any(may_draw(tree.body) for number, tree in below.items() if number not in ranks):
        return {}
    found: dict[int, Whose] = {}
    drawn: Whose = "notebook"
    for number, tree in below.items():
        wanted: Whose = ranks.get(number, "notebook")
        # a session that begins with a cell begins where the notebook is there
        begins = number == first and number in ranks
        if (begins or may_draw(tree.body)) and (wanted != drawn or wanted == "both"):
            found[number] = drawn = wanted
    return found


def may_draw(nodes: Iterable[ast.stmt]) -> bool:
    """
    Whether anything could draw a number when these statements run.

    >>> may_draw(ast.parse("def f(): return rand()").body), may_draw(ast.parse("for batch in loader: pass").body)
    (False, True)
    """
    return any(_runs_unknown_code(part) for node in nodes for part in _running(node))


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a statement that run with it: the body of a function runs later."""
    yield node
    children: Iterable[ast.AST | None] = ast.iter_child_nodes(node)
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        children = (*node.args.defaults, *node.args.kw_defaults)
    for child in filter(None, children):
        yield from _running(child)


def _runs_unknown_code(node: ast.AST) -> bool:
    """Whether it calls unknown code: a loop over a loader does, and so does an element of a data set."""
    if isinstance(node, ast.Call):
        return not (isinstance(node.func, ast.Name) and node.func.id.removeprefix("_") in _DRAWS_NOTHING)
    if isinstance(node, ast.Subscript):
        return isinstance(node.ctx, ast.Load)
    return isinstance(node, _UNKNOWN) or bool(getattr(node, "decorator_list", ()))
