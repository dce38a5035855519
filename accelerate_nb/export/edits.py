"""Texts that go over several lines of a cell, which keep those lines as they are."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from accelerate_nb.export.editing import end_of

_OF_PIECES = (ast.JoinedStr,) + ((ast.TemplateStr,) if hasattr(ast, "TemplateStr") else ())


def begin_inside(node: ast.AST) -> set[int]:
    r"""
    The lines that begin in a text, and so are part of it to their first column.

    >>> begin_inside(ast.parse("x = '''a\n  b\n'''"))
    {2, 3}
    """
    return {line for first, last in _texts(node) for line in range(first + 1, last + 1)}


def end_inside(node: ast.AST) -> set[int]:
    r"""
    The lines that end in a text, and so are part of it to their last column.

    >>> end_inside(ast.parse("x = '''a\n  b\n'''"))
    {1, 2}
    """
    return {line for first, last in _texts(node) for line in range(first, last)}


def _texts(node: ast.AST) -> Iterator[tuple[int, int]]:
    """The first and last lines of texts, whole ones: Python 3.10 doesn't know where the parts of an f-string stand."""
    if isinstance(node, _OF_PIECES) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))):
        yield node.lineno, end_of(node)[0]
        return
    for child in ast.iter_child_nodes(node):
        yield from _texts(child)
