"""Replacement of pieces of a source text at positions of Python's syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Edit:
    """A replacement between two positions; a position is a line, from 1, and a column in bytes of UTF-8, as in `ast`."""

    start: tuple[int, int]
    end: tuple[int, int]
    text: str


def instead_of(node: ast.expr | ast.stmt, text: str) -> Edit:
    """A replacement of a node, on as many lines."""
    last = end_of(node)
    return Edit((node.lineno, node.col_offset), last, text + " \\\n" * (last[0] - node.lineno - text.count("\n")))


def end_of(node: ast.expr | ast.stmt) -> tuple[int, int]:
    """The end of a node, which `ast.parse` always sets."""
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return node.end_lineno, node.end_col_offset


def edited(source: str, edits: Iterable[Edit]) -> str:
    """The source after these edits, none of which overlap."""
    lines = [line.encode() for line in source.split("\n")]
    for edit in sorted(edits, reverse=True):
        (first, begin), (last, end) = edit.start, edit.end
        joined = lines[first - 1][:begin] + edit.text.encode() + lines[last - 1][end:]
        lines[first - 1 : last] = joined.split(b"\n")
    return b"\n".join(lines).decode()


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
