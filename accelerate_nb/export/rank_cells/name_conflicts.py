"""Where one namespace would mean something else than two: the notebook's variables and the ranks', followed from cell to cell."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Literal, TypeAlias

from accelerate_nb.export.usage import Usage, usage_of

Side: TypeAlias = Literal["notebook", "ranks"]

# What a session defines on its ranks, before their first cell.
OF_THE_SESSION = ("accelerator", "rank", "world_size", "device")
_CLASS = "Accelerator"
_BY_SESSION = "defined by the session"
_TRY = (ast.Try, ast.TryStar) if hasattr(ast, "TryStar") else (ast.Try,)
_OTHER: Mapping[Side, Side] = {"notebook": "ranks", "ranks": "notebook"}
_WHO: Mapping[Side, str] = {"notebook": "the notebook", "ranks": "the ranks"}


@dataclass(frozen=True, eq=False)
class Later:
    """A name that is read, or written, when a value is used: as it is there then, or as it was when the value was sent."""

    name: str
    side: Side
    sent: Value | None = None
    writes: bool = False


@dataclass(frozen=True, eq=False)
class Value:
    """
    What a name is bound to, from one place in the notebook on.

    Two values with the same `key` are the same thing. `part` of the ranks has it, and others may not.
    """

    cell: int
    side: Side | None = None
    key: Hashable = None
    later: tuple[Later, ...] = ()
    part: bool = False
    doing: str = "bound"

    def is_same(self, other: Value | None) -> bool:
        """Whether both are one thing, wherever it is."""
        return other is self or (other is not None and self.key is not None and self.key == other.key)

    def is_module(self) -> bool:
        """Whether it was imported."""
        return isinstance(self.key, tuple) and self.key[:1] in {("import",), ("from",)}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that was found of a line of a cell."""

    cell: int
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Names:
    """
    Which values each name has: the notebook's, the ranks', and the script's, which has one for both.

    A state is never changed once another was made of it.
    """

    notebook: dict[str, Value] = field(default_factory=dict)
    ranks: dict[str, Value] = field(default_factory=dict)
    script: dict[str, Value] = field(default_factory=dict)

    def of(self, side: Side) -> dict[str, Value]:
        """One side's names."""
        return self.notebook if side == "notebook" else self.ranks

    def copy(self) -> Names:
        """The same, to go another way with."""
        return Names(dict(self.notebook), dict(self.ranks), dict(self.script))


@dataclass(frozen=True, slots=True)
class Push:
    """`%accelerate push`."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pull:
    """`%accelerate pull`."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """`%accelerate run`."""

    call: ast.expr


_Loop: TypeAlias = "ast.For | ast.AsyncFor | ast.While"
Action: TypeAlias = "Push | Pull | Call"


class Flow:
    """
    Follows the cells of a notebook in their order, and collects where the script would read another value.

    A pull covers what the ranks have under a name. `restored` holds, by cell, the names that the cell needs again as they
    were; `kept` those names by the place of the pull that covers them, `from_kept` by that of a pull which needs them again.
    `partial` are the places of pulls of what some ranks may not have, `uses_class` the cells that use the `Accelerator`
    class as the session has it.
    """

    def __init__(self) -> None:
        self.problems: list[Finding] = []
        self.notes: list[Finding] = []
        self.restored: dict[int, list[str]] = {}
        self.kept: dict[tuple[int, int], list[str]] = {}
        self.from_kept: dict[tuple[int, int], list[str]] = {}
        self.partial: set[tuple[int, int]] = set()
        self.uses_class: set[int] = set()
        self._names = Names()
        self._cell = 0
        self._sides: tuple[Side, ...] = ("notebook",)
        self._part = False
        self._may_restore = False
        self._depth = 0
        self._actions: Mapping[int, Action] = {}
        self._covered: dict[str, tuple[Value, tuple[int, int]]] = {}
        self._starred: set[Side] = set()
        self._told: set[tuple[int, str]] = set()
        self._shared = count()

    # ------------------------------------------------------------------------------------------------------- cells

    def session(self, cell: int) -> None:
        """The session starts before a cell: what it defines is on the ranks."""
        for name in OF_THE_SESSION:
            self._names.ranks[name] = self._names.script[name] = Value(cell, "ranks", doing=_BY_SESSION)
        self._names.ranks[_CLASS] = Value(cell, "ranks", ("from", 0, "accelerate_nb", _CLASS), doing=_BY_SESSION)
        # the script imports it at its top, where the ranks' cells use it
        self._names.script.setdefault(_CLASS, self._names.ranks[_CLASS])

    def notebook_cell(self, cell: int, tree: ast.Module, actions: Mapping[int, Action]) -> None:
        """A cell of the notebook's own; `actions` are its commands by their lines."""
        self._begin(cell, ("notebook",), actions)
        self._block(tree.body)

    def rank_cell(
        self, cell: int, tree: ast.Module, *, also_here: bool = False, part: bool = False, restores: bool = True
    ) -> None:
        """A cell of the ranks: of `part` of them, or of the notebook too; `restores` tells whether it can take names back."""
        self._begin(cell, ("ranks", "notebook") if also_here else ("ranks",), {})
        self._part, self._may_restore = part, restores
        self._block(tree.body)

    def _begin(self, cell: int, sides: tuple[Side, ...], actions: Mapping[int, Action]) -> None:
        self._cell, self._sides, self._actions = cell, sides, actions
        self._part, self._may_restore, self._depth = False, False, 0

    # -------------------------------------------------------------------------------------------------- statements

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
                self._ways([*(partial(self._case, one) for one in node.cases), _nothing])
            case _ if isinstance(node, _TRY):
                self._try(node)  # type: ignore[arg-type]  # both kinds have the same parts
            case _:
                self._use(node)

    def _ways(self, ways: Sequence[Callable[[], None]]) -> None:
        """One of several ways is gone."""
        before, ends = self._names, list[Names]()
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
            self._bind([handler.name] if handler.name else [], Usage(), handler.lineno)
            self._block(handler.body)
            ends.append(self._names)
        self._depth -= 1
        self._names = self._joined(ends)
        self._block(node.finalbody)

    def _case(self, one: ast.match_case) -> None:
        parts = list(ast.walk(one.pattern))
        names = [getattr(part, kind, None) for part in parts for kind in ("name", "rest")]
        self._bind([name for name in names if isinstance(name, str)], Usage(), one.pattern.lineno)
        if one.guard is not None:
            self._use(one.guard)
        self._block(one.body)

    def _use(self, node: ast.stmt | ast.expr) -> None:
        """A statement without statements of its own, or an expression."""
        usage = usage_of(node)
        # who takes a name away needs to have it
        for name in sorted(usage.read | usage.deleted):
            for side in self._sides:
                self._read(name, side, node.lineno)
        self._change(usage.changed)
        self._bind(sorted(usage.bound), usage, node.lineno)
        for name in usage.deleted:
            for names in (*(self._names.of(side) for side in self._sides), self._names.script):
                names.pop(name, None)
        if usage.everything:
            self._starred.update(self._sides)

    def _bind_target(self, target: ast.expr) -> None:
        names = [part.id for part in ast.walk(target) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)]
        self._bind(names, Usage(), target.lineno)

    # ------------------------------------------------------------------------------------------------------ reading

    def _read(self, name: str, side: Side, line: int) -> None:
        own, script = self._names.of(side).get(name), self._names.script.get(name)
        if own is None:
            if script is not None:
                self._read_unbound(name, side, line, script)
            return
        if not own.is_same(script) and not self._restore(name, side, own):
            self._refuse(name, side, line, own, script)
            return
        if name == _CLASS and own.doing == _BY_SESSION:
            self.uses_class.add(self._cell)
        for later in _all_of(own.later, self._names):
            self._read_later(later, name, line)

    def _read_unbound(self, name: str, side: Side, line: int, script: Value) -> None:
        if side in self._starred or hasattr(builtins, name):
            self._refuse(name, side, line, None, script)
        else:
            other = f"{_WHO[side]} did not have it: {_origin(script, None)}"
            self._note(line, name, f"{name} is read here, and {other}. The script has one {name} for both.")

    def _read_later(self, later: Later, through: str, line: int) -> None:
        own = later.sent or self._names.of(later.side).get(later.name)
        script = self._names.script.get(later.name)
        if own is None:
            return
        if not own.is_same(script) and not self._restore(later.name, later.side, own):
            self._refuse(later.name, later.side, line, own, script, through)
        elif later.writes:
            self._now(later.name, replace(own, cell=self._cell, side=later.side, key=None, doing="changed"), later.side)

    def _restore(self, name: str, side: Side, own: Value) -> bool:
        """Whether a rank's value that a pull has covered can be had again from the cell's first line on."""
        covered = self._covered.get(name)
        if side != "ranks" or not self._may_restore or covered is None or covered[0] is not own:
            return False
        if name not in (names := self.restored.setdefault(self._cell, [])):
            names.append(name)
        self._keep(name, covered[1])
        self._names.script[name] = own
        return True

    def _refuse(
        self, name: str, side: Side, line: int, own: Value | None, script: Value | None, through: str | None = None
    ) -> None:
        where = f"{name} is read here by {_WHO[side]}" + (f" (in {through})" if through not in {None, name} else "")
        had = "which have Python's own" if own is None else f"where {_origin(own, side)}"
        other = f"it was deleted by {_WHO[_OTHER[side]]}" if script is None else _origin(script, None)
        hint = "Pull it again, or rename" if own is not None and own.doing == "pulled" else "Rename"
        self._problem(line, name, f"{where}, {had}. A script has one {name} for both, and {other}. {hint} one of them.")

    # ------------------------------------------------------------------------------------------------------ binding

    def _bind(self, names: Iterable[str], usage: Usage, line: int) -> None:
        read = sorted(usage.read)
        for name in names:
            for side in self._sides:
                here = self._names.of(side)
                handed = [later for one in read if (value := here.get(one)) is not None for later in value.later]
                made = [Later(one, side) for one in sorted(usage.later)]
                made += [Later(one, side, writes=True) for one in sorted(usage.written_later)]
                before = here.get(name)
                on_some = self._part and (before is None or before.part)
                value = Value(self._cell, side, usage.key(name), tuple(_unique([*made, *handed])), on_some)
                if self._part and before is not None and not before.is_same(self._names.script.get(name)):
                    # on other ranks it stays what it was
                    value = replace(value, key=None)
                    self._names.script[name] = replace(value)
                    here[name] = value
                    continue
                self._now(name, value, side)
            if len(self._sides) > 1:
                self._share(name)

    def _now(self, name: str, value: Value, side: Side) -> None:
        self._names.of(side)[name] = self._names.script[name] = value

    def _share(self, name: str) -> None:
        """Both sides have the same of it now."""
        key = ("shared", next(self._shared))
        for names in (self._names.notebook, self._names.ranks):
            if names[name].key is None:
                names[name] = replace(names[name], key=key)
        self._names.script[name] = self._names.notebook[name]

    def _change(self, names: Iterable[str]) -> None:
        """What these names stand for is changed, as it is."""
        for name in names:
            side = self._sides[0]
            own, other = self._names.of(side).get(name), self._names.of(_OTHER[side]).get(name)
            # what both change, both have changed
            if own is not None and len(self._sides) == 1 and not own.is_module() and own.is_same(other):
                self._now(name, replace(own, cell=self._cell, side=side, key=None, doing="changed"), side)

    def _joined(self, ends: Sequence[Names]) -> Names:
        """What names stand for where several ways meet: something else on each side, where it was so on one of the ways."""
        joined = Names()
        for name in {name for end in ends for names in (end.notebook, end.ranks, end.script) for name in names}:
            scripts = [end.script.get(name) for end in ends]
            script = self._common(scripts)
            if script is not None:
                joined.script[name] = script
            for side in _OTHER:
                owns = [end.of(side).get(name) for end in ends]
                own = self._common(owns)
                if own is None:
                    continue
                agree = all(one is None or one.is_same(other) for one, other in zip(owns, scripts, strict=True))
                if agree and script is not None and not own.is_same(script):
                    own = replace(own, key=script.key)
                joined.of(side)[name] = own
        return joined

    def _common(self, values: Sequence[Value | None]) -> Value | None:
        """The value that a name has on all ways, or a new one that stands for all of them."""
        found = [value for value in values if value is not None]
        if not found:
            return None
        last = max(found, key=lambda value: value.cell)
        if all(value.is_same(last) for value in found):
            return last
        later = tuple(_unique([one for value in found for one in value.later]))
        return replace(last, key=("shared", next(self._shared)), later=later)

    # ------------------------------------------------------------------------------------------------------ commands

    def _act(self, action: Action, node: ast.Expr | ast.Assign) -> None:
        match action:
            case Push(names):
                for name in names:
                    self._push(name, node.lineno)
            case Pull(names):
                for name in names:
                    self._pull(name, node.lineno)
            case Call(call):
                self._run(call, node)

    def _push(self, name: str, line: int) -> None:
        self._read(name, "notebook", line)
        here = self._names.notebook.get(name)
        if here is None:
            return
        value = here if here.key is not None else replace(here, key=("shared", next(self._shared)))
        sent = tuple(replace(later, sent=later.sent or self._names.notebook.get(later.name)) for later in here.later)
        self._names.notebook[name] = self._names.script[name] = value
        self._names.ranks[name] = replace(value, later=sent)

    def _pull(self, name: str, line: int) -> None:
        place = (self._cell, line)
        there = self._names.ranks.get(name)
        if there is None:
            return
        if there.part:
            self.partial.add(place)
        if not there.is_same(self._names.script.get(name)):
            covered = self._covered.get(name)
            if covered is None or covered[0] is not there:
                self._refuse(name, "ranks", line, there, self._names.script.get(name))
            else:
                self._keep(name, covered[1])
                self.from_kept.setdefault(place, []).append(name)
        sent = tuple(replace(later, sent=later.sent or self._names.ranks.get(later.name)) for later in there.later)
        self._names.notebook[name] = self._names.script[name] = Value(
            self._cell, "notebook", later=sent, doing="pulled"
        )
        # in a loop there would be one place to keep many of them
        if self._depth == 0 and name not in self.from_kept.get(place, ()):
            self._covered[name] = (there, place)

    def _keep(self, name: str, place: tuple[int, int]) -> None:
        if name not in (names := self.kept.setdefault(place, [])):
            names.append(name)

    def _run(self, call: ast.expr, node: ast.Expr | ast.Assign) -> None:
        usage = usage_of(ast.copy_location(ast.Expr(call), node))
        for name in sorted(usage.read):
            own = self._names.notebook.get(name)
            self._read(name, "notebook", node.lineno)
            for later in _all_of(own.later, self._names) if own is not None else ():
                if later.writes and (value := self._names.script.get(later.name)) is not None:
                    # the ranks' copy is changed, and not the notebook's
                    changed = replace(value, cell=self._cell, side="ranks", key=None, doing="changed")
                    self._names.script[later.name] = changed
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind_target(target)

    # -------------------------------------------------------------------------------------------------------- telling

    def _problem(self, line: int, name: str, text: str) -> None:
        if (self._cell, name) not in self._told:
            self._told.add((self._cell, name))
            self.problems.append(Finding(self._cell, line, text))

    def _note(self, line: int, name: str, text: str) -> None:
        if (self._cell, name) not in self._told:
            self._told.add((self._cell, name))
            self.notes.append(Finding(self._cell, line, text))


def _nothing() -> None:
    """The way on which nothing is done."""


def _origin(value: Value, known: Side | None) -> str:
    if value.doing == _BY_SESSION:
        return "the session defines it" + ("" if known else " on the ranks")
    whose = "" if value.side in {known, None} else f" by {_WHO[value.side or 'notebook']}"
    return f"it was {value.doing} in cell {value.cell}{whose}"


def _all_of(later: Iterable[Later], names: Names) -> Iterator[Later]:
    """What is read later, and what that reads in turn."""
    waiting, known = list(later), set[tuple[str, Side]]()
    while waiting:
        one = waiting.pop()
        if (one.name, one.side) in known:
            continue
        known.add((one.name, one.side))
        yield one
        value = one.sent or names.of(one.side).get(one.name)
        waiting += value.later if value is not None else ()


def _unique(later: Iterable[Later]) -> Iterator[Later]:
    known: set[tuple[str, Side, int, bool]] = set()
    for one in later:
        mark = (one.name, one.side, id(one.sent), one.writes)
        if mark not in known:
            known.add(mark)
            yield one
