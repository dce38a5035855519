"""`from __future__ import ...` in cells: a script has them once, at its top."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from accelerate_nb.export.edits import Edit, edited, end_of, instead_of


@dataclass(frozen=True, slots=True)
class HoistedImports:
    """A cell without its imports from the future, and the names that it imports from there."""

    source: str
    names: tuple[str, ...] = ()


def hoisted(source: str) -> HoistedImports:
    """
    Take the imports from the future out of a cell; its other lines stay where they are.

    >>> hoisted("from __future__ import annotations").source
    '# from __future__ import annotations'
    """
    imports = (node for node in ast.parse(source).body if isinstance(node, ast.ImportFrom))
    found = [node for node in imports if node.module == "__future__"]
    edits = [edit for node in found for edit in _without(node, source.split("\n"))]
    return HoistedImports(edited(source, edits), tuple(alias.name for node in found for alias in node.names))


def _without(node: ast.ImportFrom, lines: list[str]) -> list[Edit]:
    last, end = end_of(node)
    before = lines[node.lineno - 1].encode()[: node.col_offset]
    after = lines[last - 1].encode()[end:].strip()
    if before.strip() or (after and not after.startswith(b"#")):
        return [instead_of(node, "pass")]
    return [Edit((line, 0), (line, 0), "# ") for line in range(node.lineno, last + 1)]
