"""The value of a cell's last expression, which a notebook shows below the cell and the script prints."""

from __future__ import annotations

import ast

from accelerate_nb.export.edits import Edit, end_of

# They give nothing back that a notebook would show.
_SILENT = frozenset({"print", "display", "plt.show", "pyplot.show", "shown", "nb_shell.run"})
_SILENT_CELLS = frozenset({"accelerate", "bash", "capture", "file", "script", "sh", "writefile"})


def result_of(source: str, cell: str = "") -> ast.Expr | None:
    """
    The expression whose value a notebook shows: the last statement, unless a semicolon follows it.

    `cell` is what the source was made of, line by line: an expression that came before a magic shows nothing.
    """
    body = ast.parse(source).body
    last = body[-1] if body else None
    if not isinstance(last, ast.Expr) or _is_silent(last.value):
        return None
    line, column = end_of(last)
    if any(text.strip() and not text.lstrip().startswith("#") for text in cell.split("\n")[line:]):
        return None
    after = source.split("\n")[line - 1].encode()[column:]
    return None if after.lstrip().startswith(b";") else last


def showing(result: ast.Expr, function: str) -> list[Edit]:
    """The edits that make `function(...)` of an expression."""
    # `shown(a, b)` would be two arguments
    opening, closing = ("((", "))") if isinstance(result.value, ast.Tuple) else ("(", ")")
    start, end = (result.lineno, result.col_offset), end_of(result)
    return [Edit(start, start, function + opening), Edit(end, end, closing)]


def _is_silent(value: ast.expr) -> bool:
    if isinstance(value, ast.Constant) and value.value is None:
        return True
    if not isinstance(value, ast.Call):
        return False
    function = ast.unparse(value.func)
    is_cell = (
        function == "nb_shell.cell" and isinstance(value.args[0], ast.Constant) and value.args[0].value in _SILENT_CELLS
    )
    return function in _SILENT or is_cell
