"""The statements of a cell in the order of their execution, with the ways that branches and loops may go."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from accelerate_nb.export.rank_cells.bound_values import NameTable
from accelerate_nb.export.rank_cells.name_usage import NameUsage

_TRY = (ast.Try, ast.TryStar) if hasattr(ast, "TryStar") else (ast.Try,)


@dataclass(frozen=True, slots=True)
class PushLine:
    """`%accelerate push`."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PullLine:
    """`%accelerate pull`."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunLine:
    """`%accelerate run`."""

    call: ast.expr


_Loop: TypeAlias = "ast.For | ast.AsyncFor | ast.While"
Action: TypeAlias = "PushLine | PullLine | RunLine"


class StatementWalker(ABC):
    """
    Walks the statements of a cell, and joins the tables of names where ways meet.

    `_depth` is the number of branches and loops around a statement, `_actions` are the commands of a cell by their lines.
    """

    def __init__(self) -> None:
        self._names = NameTable()
        self._depth = 0
        self._actions: Mapping[int, Action] = {}

    @abstractmethod
    def _use(self, node: ast.stmt | ast.expr) -> None:
        """A statement without statements of its own, or an expression."""

    @abstractmethod
    def _act(self, action: Action, node: ast.Expr | ast.Assign) -> None:
        """A command."""

    @abstractmethod
    def _bind(self, names: Iterable[str], usage: NameUsage, line: int) -> None:
        """Names get values."""

    @abstractmethod
    def _bind_target(self, target: ast.expr) -> None:
        """The names of a target get values."""

    @abstractmethod
    def _joined(self, ends: Sequence[NameTable]) -> NameTable:
        """The table after one of several ways."""

    def _block(self, body: Iterable[ast.stmt]) -> None:
        for node in body:
            self._statement(node)

    def _statement(self, node: ast.stmt) -> None:
        if (action := self._actions.get(node.lineno)) is not None and isinstance(node, (ast.Expr, ast.Assign)):
            self._act(action, node)
            return
        match node:
            case ast.If():
                self._use(node.test)
                self._ways([partial(self._block, node.body), partial(self._block, node.orelse)])
            case ast.For() | ast.AsyncFor():
                self._use(node.iter)
                self._loop(partial(self._round, node), node)
            case ast.While():
                self._loop(partial(self._round, node), node)
            case ast.With() | ast.AsyncWith():
                self._with(node)
            case ast.Match():
                self._use(node.subject)
                self._ways([*(partial(self._case, case) for case in node.cases), _nothing])
            case _ if isinstance(node, _TRY):
                self._try(node)  # type: ignore[arg-type]  # both kinds have the same parts
            case _:
                self._use(node)

    def _ways(self, ways: Sequence[Callable[[], None]]) -> None:
        """One of several ways is gone."""
        before, ends = self._names, list[NameTable]()
        self._depth += 1
        for way in ways:
            self._names = before.copy()
            way()
            ends.append(self._names)
        self._depth -= 1
        self._names = self._joined(ends)

    def _loop(self, once: Callable[[], None], node: _Loop) -> None:
        # twice, for what one round leaves to the next
        self._ways([_nothing, once])
        self._ways([_nothing, once])
        self._block(node.orelse)

    def _round(self, node: _Loop) -> None:
        if isinstance(node, ast.While):
            self._use(node.test)
        else:
            self._bind_target(node.target)
        self._block(node.body)

    def _with(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            self._use(item.context_expr)
            if item.optional_vars is not None:
                self._bind_target(item.optional_vars)
        self._block(node.body)

    def _try(self, node: ast.Try) -> None:
        before = self._names.copy()
        self._depth += 1
        self._block(node.body)
        whole = self._names.copy()
        self._block(node.orelse)
        ends = [self._names]
        for handler in node.handlers:
            self._names = self._joined([before, whole])
            if handler.type is not None:
                self._use(handler.type)
            self._bind([handler.name] if handler.name else [], NameUsage(), handler.lineno)
            self._block(handler.body)
            ends.append(self._names)
        self._depth -= 1
        self._names = self._joined(ends)
        self._block(node.finalbody)

    def _case(self, node: ast.match_case) -> None:
        parts = list(ast.walk(node.pattern))
        names = [getattr(part, attribute, None) for part in parts for attribute in ("name", "rest")]
        self._bind([name for name in names if isinstance(name, str)], NameUsage(), node.pattern.lineno)
        if node.guard is not None:
            self._use(node.guard)
        self._block(node.body)


def _nothing() -> None:
    """The way on which nothing is done."""
