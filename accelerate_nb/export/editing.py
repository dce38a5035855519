"""Pieces of a source text are replaced by others, where Python's syntax tree says that they stand."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Edit:
    """What stands between two places is replaced; a place is a line, from 1, and a column in bytes of UTF-8, as `ast` has it."""

    start: tuple[int, int]
    end: tuple[int, int]
    text: str


def instead_of(node: ast.expr | ast.stmt, text: str) -> Edit:
    """Other text in the place of a node, on as many lines."""
    last = end_of(node)
    return Edit((node.lineno, node.col_offset), last, text + " \\\n" * (last[0] - node.lineno - text.count("\n")))


def end_of(node: ast.expr | ast.stmt) -> tuple[int, int]:
    """Where a node ends; what `ast.parse` gives always knows."""
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
