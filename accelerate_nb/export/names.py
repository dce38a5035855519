"""Names that statements bind and look up when they run; the body of a function runs later."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TypeAlias

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
