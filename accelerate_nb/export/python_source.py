"""Python's source as an export changes it: replacements in it, the names in it, its last value, its imports from the future."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias


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


Function: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda"


def bound(nodes: Iterable[ast.AST]) -> set[str]:
    """
    The names of the module that these statements give a value to, or take away.

    >>> sorted(bound(ast.parse("import os.path; x, y = 1, [z for z in ()]").body))
    ['os', 'x', 'y']
    """
    return _BoundNames(part for node in nodes for part in with_texts(node)).names


def with_texts(node: ast.AST) -> Iterator[ast.AST]:
    """A statement, and the code in texts that it gives a magic to run."""
    yield node
    for call in ast.walk(node):
        if not isinstance(call, ast.Call) or ast.unparse(call.func) not in {"nb_shell.line", "nb_shell.cell"}:
            continue
        name, *texts = (str(part.value) if isinstance(part, ast.Constant) else "" for part in call.args)
        if name == "capture":
            # the name of what it captures
            yield from (ast.Name(word, ast.Store()) for word in texts[0].split() if word.isidentifier())
        if name == "accelerate" and texts[0].startswith("pull "):
            yield from (ast.Name(word, ast.Store()) for word in texts[0].split()[1:] if word.isidentifier())
        is_code = name in {"time", "capture"} or (
            name == "accelerate" and {"--local", "--also-here"} & {*texts[0].split()}
        )
        with suppress(SyntaxError):
            yield from ast.parse(texts[-1]).body if is_code else ()


def looked_up(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that these statements need at the time at which they run."""
    return _ReadNames(nodes).names


def called(nodes: Iterable[ast.AST]) -> set[str]:
    """The names among those that `looked_up` finds that are called, or decorate something."""
    return _ReadNames(nodes).called


def mentioned(node: ast.AST) -> set[str]:
    """Every name that is looked up anywhere in a statement, now or when a function of it is called."""
    parts = (item for part in with_texts(node) for item in ast.walk(part))
    return {item.id for item in parts if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Load)}


class _ModuleScopeVisitor(ast.NodeVisitor):
    """Visits what runs with the statements themselves."""

    def __init__(self, nodes: Iterable[ast.AST]) -> None:
        self.names: set[str] = set()
        self.called: set[str] = set()
        for node in nodes:
            self.visit(node)

    def _visit_function(self, node: Function) -> None:
        for child in (*getattr(node, "decorator_list", ()), *node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(child)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._visit_function(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit_function(node)


class _BoundNames(_ModuleScopeVisitor):
    def _visit_definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.names.add(node.name)
        self._visit_function(node)

    visit_FunctionDef = visit_AsyncFunctionDef = _visit_definition  # noqa: N815 - the names that `ast` calls

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.names.add(node.name)
        for child in (*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords)):
            self.visit(child)

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            self.names.add(node.id)

    def visit_alias(self, node: ast.alias) -> None:
        self.names.add(node.asname or node.name.partition(".")[0])

    def visit_comprehension(self, node: ast.comprehension) -> None:
        # its target is its own, unlike what `:=` binds anywhere in it
        for child in (node.iter, *node.ifs):
            self.visit(child)

    def _visit_named(self, node: ast.ExceptHandler | ast.MatchAs | ast.MatchStar | ast.MatchMapping) -> None:
        name = node.rest if isinstance(node, ast.MatchMapping) else node.name
        if name is not None:
            self.names.add(name)
        self.generic_visit(node)

    visit_ExceptHandler = visit_MatchAs = visit_MatchStar = visit_MatchMapping = _visit_named  # noqa: N815 - as above


class _ReadNames(_ModuleScopeVisitor):
    def _visit_function(self, node: Function) -> None:
        super()._visit_function(node)
        self.called |= _names(getattr(node, "decorator_list", ()))
        # annotations are looked up with the definition, up to Python 3.13
        arguments = node.args
        every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
        for annotation in (*(item.annotation for item in every if item is not None), getattr(node, "returns", None)):
            if annotation is not None:
                self.visit(annotation)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.called |= _names(node.decorator_list)
        # what its body binds is its own, so it hides nothing of the module: only names from outside are wanted here
        inside = bound(node.body)
        self.names |= looked_up(node.body) - inside
        self.called |= called(node.body) - inside
        for child in (*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords)):
            self.visit(child)

    def visit_Call(self, node: ast.Call) -> None:
        self.called |= _names([node.func])
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self.names.add(node.id)


def _names(nodes: Iterable[ast.AST]) -> set[str]:
    return {item.id for node in nodes for item in ast.walk(node) if isinstance(item, ast.Name)}


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


def hoisted(source: str) -> tuple[str, tuple[str, ...]]:
    """
    A cell without its imports from the future, its other lines where they are, and the names that it imports from there.

    >>> hoisted("from __future__ import annotations")
    ('# from __future__ import annotations', ('annotations',))
    """
    imports = (node for node in ast.parse(source).body if isinstance(node, ast.ImportFrom))
    found = [node for node in imports if node.module == "__future__"]
    edits = [edit for node in found for edit in _without(node, source.split("\n"))]
    return edited(source, edits), tuple(alias.name for node in found for alias in node.names)


def _without(node: ast.ImportFrom, lines: list[str]) -> list[Edit]:
    last, end = end_of(node)
    before = lines[node.lineno - 1].encode()[: node.col_offset]
    after = lines[last - 1].encode()[end:].strip()
    if before.strip() or (after and not after.startswith(b"#")):
        return [instead_of(node, "pass")]
    return [Edit((line, 0), (line, 0), "# ") for line in range(node.lineno, last + 1)]
