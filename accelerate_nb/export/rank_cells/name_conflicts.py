"""Conflicts of names: the notebook and the ranks have two namespaces, followed from cell to cell, the script has one."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from accelerate_nb.export.rank_cells.bound_values import BoundValue, DeferredUse, NameTable, Side, all_of, unique
from accelerate_nb.export.rank_cells.name_usage import NameUsage, usage_of
from accelerate_nb.export.rank_cells.statement_walker import Action, PullLine, PushLine, RunLine, StatementWalker

# What a session defines on its ranks, before their first cell.
OF_THE_SESSION = ("accelerator", "rank", "world_size", "device")
_CLASS = "Accelerator"
_BY_SESSION = "defined by the session"
_OTHER: Mapping[Side, Side] = {"notebook": "ranks", "ranks": "notebook"}
_WHO: Mapping[Side, str] = {"notebook": "the notebook", "ranks": "the ranks"}


@dataclass(frozen=True, slots=True)
class ConflictFound:
    """Something that was found of a line of a cell."""

    cell: int
    line: int
    text: str


class ConflictFinder(StatementWalker):
    """
    Follows the cells of a notebook in order, and collects the reads that would get another value in the script.

    A pull covers what the ranks have under a name. `restored` holds, by cell, the names that the cell needs again as they
    were; `kept` those names by the position of the pull that covers them, `from_kept` by that of a pull which needs them again.
    `partial` are the positions of pulls of what some ranks may not have, `uses_class` the cells that use the `Accelerator`
    class as the session has it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[ConflictFound] = []
        self.notes: list[ConflictFound] = []
        self.restored: dict[int, list[str]] = {}
        self.kept: dict[tuple[int, int], list[str]] = {}
        self.from_kept: dict[tuple[int, int], list[str]] = {}
        self.partial: set[tuple[int, int]] = set()
        self.uses_class: set[int] = set()
        self._cell = 0
        self._sides: tuple[Side, ...] = ("notebook",)
        self._part = False
        self._may_restore = False
        self._covered: dict[str, tuple[BoundValue, tuple[int, int]]] = {}
        self._starred: set[Side] = set()
        self._reported: set[tuple[int, str]] = set()
        self._shared = count()

    # ------------------------------------------------------------------------------------------------------- cells

    def session(self, cell: int) -> None:
        """The session starts before a cell: what it defines is on the ranks."""
        for name in OF_THE_SESSION:
            self._names.ranks[name] = self._names.script[name] = BoundValue(cell, "ranks", doing=_BY_SESSION)
        self._names.ranks[_CLASS] = BoundValue(cell, "ranks", ("from", 0, "accelerate_nb", _CLASS), doing=_BY_SESSION)
        # the script imports it at its top, where the ranks' cells use it
        self._names.script.setdefault(_CLASS, self._names.ranks[_CLASS])

    def notebook_cell(self, cell: int, tree: ast.Module, actions: Mapping[int, Action]) -> None:
        """A cell of the notebook's own; `actions` are its commands by their lines."""
        self._begin(cell, ("notebook",), actions)
        self._block(tree.body)

    def rank_cell(
        self, cell: int, tree: ast.Module, *, local: bool = False, part: bool = False, restores: bool = True
    ) -> None:
        """A cell of the ranks: of `part` of them, or of the notebook too; `restores` is whether it can take names back."""
        self._begin(cell, ("ranks", "notebook") if local else ("ranks",), {})
        self._part, self._may_restore = part, restores
        self._block(tree.body)

    def _begin(self, cell: int, sides: tuple[Side, ...], actions: Mapping[int, Action]) -> None:
        self._cell, self._sides, self._actions = cell, sides, actions
        self._part, self._may_restore, self._depth = False, False, 0

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
        self._bind(names, NameUsage(), target.lineno)

    # ------------------------------------------------------------------------------------------------------ reading

    def _read(self, name: str, side: Side, line: int) -> None:
        bound_value, script = self._names.of(side).get(name), self._names.script.get(name)
        if bound_value is None:
            if script is not None:
                self._read_unbound(name, side, line, script)
            return
        if not bound_value.is_same(script) and not self._restore(name, side, bound_value):
            self._refuse(name, side, line, bound_value, script)
            return
        if name == _CLASS and bound_value.doing == _BY_SESSION:
            self.uses_class.add(self._cell)
        for deferred in all_of(bound_value.deferred, self._names):
            self._read_deferred(deferred, name, line)

    def _read_unbound(self, name: str, side: Side, line: int, script: BoundValue) -> None:
        if side in self._starred or hasattr(builtins, name):
            self._refuse(name, side, line, None, script)
        else:
            other = f"{_WHO[side]} did not have it: {_origin(script, None)}"
            text = f"{name} is read here, and {other}. The script has one {name} for both."
            self._report(self.notes, line, name, text)

    def _read_deferred(self, deferred: DeferredUse, through: str, line: int) -> None:
        bound_value = deferred.sent or self._names.of(deferred.side).get(deferred.name)
        script = self._names.script.get(deferred.name)
        if bound_value is None:
            return
        if not bound_value.is_same(script) and not self._restore(deferred.name, deferred.side, bound_value):
            self._refuse(deferred.name, deferred.side, line, bound_value, script, through)
        elif deferred.writes:
            changed = replace(bound_value, cell=self._cell, side=deferred.side, key=None, doing="changed")
            self._now(deferred.name, changed, deferred.side)

    def _restore(self, name: str, side: Side, bound_value: BoundValue) -> bool:
        """Whether a rank's value that a pull has covered can be had again from the cell's first line on."""
        covered = self._covered.get(name)
        if side != "ranks" or not self._may_restore or covered is None or covered[0] is not bound_value:
            return False
        if name not in (names := self.restored.setdefault(self._cell, [])):
            names.append(name)
        self._keep(name, covered[1])
        self._names.script[name] = bound_value
        return True

    def _refuse(
        self,
        name: str,
        side: Side,
        line: int,
        bound_value: BoundValue | None,
        script: BoundValue | None,
        through: str | None = None,
    ) -> None:
        where = f"{name} is read here by {_WHO[side]}" + (f" (in {through})" if through not in {None, name} else "")
        had = "which have Python's own" if bound_value is None else f"where {_origin(bound_value, side)}"
        other = f"it was deleted by {_WHO[_OTHER[side]]}" if script is None else _origin(script, None)
        was_pulled = bound_value is not None and bound_value.doing == "pulled"
        suggestion = "Pull it again, or rename" if was_pulled else "Rename"
        text = f"{where}, {had}. A script has one {name} for both, and {other}. {suggestion} one of them."
        self._report(self.problems, line, name, text)

    # ------------------------------------------------------------------------------------------------------ binding

    def _bind(self, names: Iterable[str], usage: NameUsage, line: int) -> None:
        read = sorted(usage.read)
        for name in names:
            for side in self._sides:
                bound_names = self._names.of(side)
                values = (bound_names[item] for item in read if item in bound_names)
                handed = [deferred for value in values for deferred in value.deferred]
                made = [DeferredUse(item, side) for item in sorted(usage.deferred)]
                made += [DeferredUse(item, side, writes=True) for item in sorted(usage.written_in_functions)]
                before = bound_names.get(name)
                on_some = self._part and (before is None or before.part)
                value = BoundValue(self._cell, side, usage.key(name), tuple(unique([*made, *handed])), on_some)
                if self._part and before is not None and not before.is_same(self._names.script.get(name)):
                    # on other ranks it stays what it was
                    value = replace(value, key=None)
                    self._names.script[name] = replace(value)
                    bound_names[name] = value
                    continue
                self._now(name, value, side)
            if len(self._sides) > 1:
                self._share(name)

    def _now(self, name: str, value: BoundValue, side: Side) -> None:
        self._names.of(side)[name] = self._names.script[name] = value

    def _share(self, name: str) -> None:
        """Both sides have the same of it now."""
        key = ("shared", next(self._shared))
        for names in (self._names.notebook, self._names.ranks):
            if names[name].key is None:
                names[name] = replace(names[name], key=key)
        self._names.script[name] = self._names.notebook[name]

    def _change(self, names: Iterable[str]) -> None:
        """Record a change of these names' values in place."""
        for name in names:
            side = self._sides[0]
            bound_value, other = self._names.of(side).get(name), self._names.of(_OTHER[side]).get(name)
            # what both change, both have changed
            if bound_value is None or len(self._sides) > 1 or bound_value.is_module():
                continue
            if bound_value.is_same(other):
                self._now(name, replace(bound_value, cell=self._cell, side=side, key=None, doing="changed"), side)

    def _joined(self, ends: Sequence[NameTable]) -> NameTable:
        """The names after a branch: their values differ between the sides if they did on one branch."""
        joined = NameTable()
        for name in {name for end in ends for names in (end.notebook, end.ranks, end.script) for name in names}:
            scripts = [end.script.get(name) for end in ends]
            if (script := self._common(scripts)) is not None:
                joined.script[name] = script
            for side in _OTHER:
                bound_values = [end.of(side).get(name) for end in ends]
                if (bound_value := self._common(bound_values)) is None:
                    continue
                both = zip(bound_values, scripts, strict=True)
                agree = all(item is None or item.is_same(other) for item, other in both)
                if agree and script is not None and not bound_value.is_same(script):
                    bound_value = replace(bound_value, key=script.key)
                joined.of(side)[name] = bound_value
        return joined

    def _common(self, values: Sequence[BoundValue | None]) -> BoundValue | None:
        """The value that a name has on all branches, or a new one that represents all of them."""
        found = [value for value in values if value is not None]
        if not found:
            return None
        last = max(found, key=lambda value: value.cell)
        if all(value.is_same(last) for value in found):
            return last
        deferred = tuple(unique([item for value in found for item in value.deferred]))
        return replace(last, key=("shared", next(self._shared)), deferred=deferred)

    # ------------------------------------------------------------------------------------------------------ commands

    def _act(self, action: Action, node: ast.Expr | ast.Assign) -> None:
        match action:
            case PushLine(names):
                for name in names:
                    self._push(name, node.lineno)
            case PullLine(names):
                for name in names:
                    self._pull(name, node.lineno)
            case RunLine(call):
                self._run(call, node)

    def _push(self, name: str, line: int) -> None:
        self._read(name, "notebook", line)
        bound_names = self._names.notebook.get(name)
        if bound_names is None:
            return
        value = bound_names if bound_names.key is not None else replace(bound_names, key=("shared", next(self._shared)))
        sent = tuple(
            replace(deferred, sent=deferred.sent or self._names.notebook.get(deferred.name))
            for deferred in bound_names.deferred
        )
        self._names.notebook[name] = self._names.script[name] = value
        self._names.ranks[name] = replace(value, deferred=sent)

    def _pull(self, name: str, line: int) -> None:
        position = (self._cell, line)
        there = self._names.ranks.get(name)
        if there is None:
            return
        if there.part:
            self.partial.add(position)
        if not there.is_same(self._names.script.get(name)):
            covered = self._covered.get(name)
            if covered is None or covered[0] is not there:
                self._refuse(name, "ranks", line, there, self._names.script.get(name))
            else:
                self._keep(name, covered[1])
                self.from_kept.setdefault(position, []).append(name)
        sent = tuple(
            replace(deferred, sent=deferred.sent or self._names.ranks.get(deferred.name)) for deferred in there.deferred
        )
        self._names.notebook[name] = self._names.script[name] = BoundValue(
            self._cell, "notebook", deferred=sent, doing="pulled"
        )
        # in a loop there would be one variable to keep many of them
        if self._depth == 0 and name not in self.from_kept.get(position, ()):
            self._covered[name] = (there, position)

    def _keep(self, name: str, position: tuple[int, int]) -> None:
        if name not in (names := self.kept.setdefault(position, [])):
            names.append(name)

    def _run(self, call: ast.expr, node: ast.Expr | ast.Assign) -> None:
        usage = usage_of(ast.copy_location(ast.Expr(call), node))
        for name in sorted(usage.read):
            bound_value = self._names.notebook.get(name)
            self._read(name, "notebook", node.lineno)
            for deferred in all_of(bound_value.deferred, self._names) if bound_value is not None else ():
                if deferred.writes and (value := self._names.script.get(deferred.name)) is not None:
                    # the ranks' copy is changed, and not the notebook's
                    changed = replace(value, cell=self._cell, side="ranks", key=None, doing="changed")
                    self._names.script[deferred.name] = changed
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind_target(target)

    # -------------------------------------------------------------------------------------------------------- telling

    def _report(self, found: list[ConflictFound], line: int, name: str, text: str) -> None:
        """Add a finding to the problems or the notes; of each name in a cell, the first is reported."""
        if (self._cell, name) not in self._reported:
            self._reported.add((self._cell, name))
            found.append(ConflictFound(self._cell, line, text))


def _origin(value: BoundValue, known: Side | None) -> str:
    if value.doing == _BY_SESSION:
        return "the session defines it" + ("" if known else " on the ranks")
    whose = "" if value.side in {known, None} else f" by {_WHO[value.side or 'notebook']}"
    return f"it was {value.doing} in cell {value.cell}{whose}"
