"""What `%%accelerate` cells and `%accelerate` lines are in a script, every process of which runs all of it."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accelerate_nb.config.cells import (
    CellWish,
    PullWish,
    names_of,
    ranks_of,
    read,
    read_cell_line,
    read_line,
    refuse,
)
from accelerate_nb.config.run import all_settings
from accelerate_nb.errors import AccelerateNbError
from accelerate_nb.export.drawing import Whose
from accelerate_nb.export.editing import edited
from accelerate_nb.export.flow import Action, Call, Flow, Pull, Push
from accelerate_nb.export.hearing import NAME, Command, Heard, cell_magic, heard
from accelerate_nb.export.names import bound
from accelerate_nb.export.plain import Plain, Ranked, Remark
from accelerate_nb.export.reading import Cell
from accelerate_nb.export.results import result_of, showing
from accelerate_nb.export.texts import begin_inside

_MENTIONED = re.compile(rf"%{NAME}\b")
_HELP = frozenset({"-h", "--help", "help"})
_VALUES = "accelerate_nb.script.values"
_DRAWING = "accelerate_nb.script.drawing"
# What a script has no use for, and why.
_LEFT_OUT = {
    "status": "",
    "stacks": "",
    "logs": "",
    "wait": "a script's cells wait for each other anyway",
    "interrupt": "a script's cells wait for each other anyway",
    "config": "say the settings behind %%accelerate, or to accelerate-nb launch",
}
# How a notebook shows a session; a terminal has ways of its own.
_OF_NOTEBOOKS = frozenset({"panel"})
# What a session follows from the next cell on, without starting anew.
_FOLLOWED = frozenset({"panel", "quiet", "grace", "log_line_prefix_template"})


def ranked(cells: Sequence[Cell]) -> Ranked:
    r"""
    What becomes of a notebook's cells on ranks; a notebook without them stays as it is.

    >>> ranked([Cell("code", "%%accelerate -n 2\nprint(rank)", 1)]).needed
    'num_processes=2'
    """
    code = [cell for cell in cells if cell.kind == "code" and cell.number is not None]
    if not any(_MENTIONED.search(cell.source) for cell in code):
        return Ranked()
    return _Notebook([_Read.of(cell) for cell in code]).ranked()


@dataclass(frozen=True, slots=True)
class _Read:
    """A cell, with what `%%accelerate` says of it where it is one of the ranks'."""

    number: int
    source: str
    heard: Heard
    line: int = 0
    flags: str | None = None

    @classmethod
    def of(cls, cell: Cell) -> _Read:
        assert cell.number is not None
        magic = cell_magic(cell.source)
        if magic is None or magic.name != NAME:
            return cls(cell.number, cell.source, heard(cell.source))
        lines = cell.source.split("\n")
        below = heard("\n".join([*[""] * magic.line, *lines[magic.line :]]))
        return cls(cell.number, cell.source, below, magic.line, magic.rest)


@dataclass
class _Asked:
    """What the cells, one after the other, ask of the session."""

    first: int | None = None
    said: dict[str, Any] = field(default_factory=dict)
    stopped: tuple[int, int] | None = None

    def ready(self, cell: int, said: Mapping[str, Any] | None = None, *, fresh: bool = False) -> str | None:
        """Why a cell can't have the session that it asks for."""
        known = {one.name: one.default for one in all_settings()}
        said = said or {}
        if self.first is None:
            self.first = cell
            self.said.update(said)
            return None
        if fresh:
            return "the session would start anew here, and the variables of a script's processes can't be forgotten"
        for name, now in said.items():
            was = self.said.get(name, known[name])
            if now != was and name not in _FOLLOWED:
                return (
                    f"the session would start anew here ({name} was {was} and is {now} now), and a script's processes "
                    "stay the same. Say it in the first %%accelerate cell"
                )
        self.said.update(said)
        return None

    def needed(self) -> str:
        """The settings, as the text of a call's arguments."""
        return ", ".join(f"{name}={_spelled(value)}" for name, value in self.said.items() if name not in _OF_NOTEBOOKS)


@dataclass
class _Written:
    """What has been made of a cell so far."""

    lines: list[str]
    imports: list[str] = field(default_factory=list)
    notes: list[Remark] = field(default_factory=list)
    problems: list[Remark] = field(default_factory=list)
    is_changed: bool = False

    def replace(self, first: int, last: int, text: str) -> None:
        """Put one line in the place of some; the others become empty comments."""
        self.lines[first - 1 : last] = [text, *["#"] * (last - first)]
        self.is_changed = True

    def plain(self) -> Plain:
        """The cell."""
        return Plain("\n".join(self.lines), tuple(self.imports), tuple(self.notes), tuple(self.problems))


class _Notebook:
    """The cells, followed in their order and then written."""

    def __init__(self, cells: Sequence[_Read]) -> None:
        self._cells = cells
        self._asked = _Asked()
        self._flow = Flow()
        self._whose: dict[int, Whose] = {}
        self._written = {cell.number: _Written(cell.heard.source.split("\n")) for cell in cells}
        self._later: list[Callable[[], None]] = []
        taken = {name for cell in cells if cell.heard.tree is not None for name in bound(cell.heard.tree.body)}
        self._called = {name: f"_{name}" if name in taken else name for name in ("push", "pull", "pull_from", "run")}

    def ranked(self) -> Ranked:
        """All of it."""
        for cell in self._cells:
            self._rank_cell(cell) if cell.flags is not None else self._notebook_cell(cell)
        # only now it is known which names are needed again
        for write in self._later:
            write()
        for finding in self._flow.problems:
            self._written[finding.cell].problems.append(Remark(finding.line, finding.text))
        for finding in self._flow.notes:
            self._written[finding.cell].notes.append(Remark(finding.line, finding.text))
        others = [(number, one) for number, one in self._written.items() if not one.is_changed]
        return Ranked(
            {number: one.plain() for number, one in self._written.items() if one.is_changed},
            None if self._asked.first is None else self._asked.needed(),
            self._asked.first,
            self._whose,
            tuple((number, remark) for number, one in others for remark in one.notes),
            tuple((number, remark) for number, one in others for remark in one.problems),
        )

    # -------------------------------------------------------------------------------------------------- cells of ranks

    def _rank_cell(self, cell: _Read) -> None:
        assert cell.flags is not None
        written = self._written[cell.number]
        written.lines = cell.source.split("\n")
        if _HELP & set(cell.flags.split()):
            self._comment_all(cell)
            return
        try:
            wish, said = read_cell_line(cell.flags)
            ranks = ranks_of(wish.ranks, {**self._asked.said, **said}.get("num_processes"))
        except AccelerateNbError as error:
            self._problem(cell, cell.line, str(error))
            return
        self._session(cell, cell.line, said, fresh=wish.fresh)
        self._check(cell, wish, ranks)
        self._whose[cell.number] = "both" if wish.also_here else "ranks"
        if cell.heard.tree is not None:
            # a cell magic below has to stay the first that is not empty, and a guard has no room for more
            restores = ranks is None and cell_magic("\n".join(written.lines[cell.line :])) is None
            self._flow.rank_cell(
                cell.number,
                cell.heard.tree,
                also_here=wish.also_here,
                part=ranks is not None,
                restores=restores,
            )
        self._later.append(lambda: self._write_rank_cell(cell, ranks))

    def _check(self, cell: _Read, wish: CellWish, ranks: tuple[int, ...] | None) -> None:
        written = self._written[cell.number]
        if ranks is not None and wish.also_here:
            self._problem(
                cell,
                cell.line,
                "--ranks and --also-here are both asked for, and a script's processes are the notebook and the ranks in one. "
                "Leave one of them out",
            )
        for said, what in ((wish.background, "--background"), (wish.timeout is not None, "--timeout")):
            if said:
                written.notes.append(
                    Remark(cell.line, f"{what} was left out: a script's cells run one after the other")
                )
        for command in cell.heard.commands:
            self._problem(cell, command.first, f"%{NAME} stands in a %%{NAME} cell, where no rank knows it")

    def _write_rank_cell(self, cell: _Read, ranks: tuple[int, ...] | None) -> None:
        written = self._written[cell.number]
        magic, below = written.lines[cell.line - 1].strip(), written.lines[cell.line :]
        if cell.number in self._flow.uses_class:
            written.imports.append("from accelerate_nb import Accelerator")
        if ranks is not None:
            guard = f"({', '.join(map(str, ranks))}{',' * (len(ranks) == 1)})"
            written.replace(cell.line, cell.line, f"if rank in {guard}:  # {magic}")
            written.lines[cell.line :] = self._guarded(cell, below)
        elif restored := self._flow.restored.get(cell.number):
            written.replace(
                cell.line, cell.line, "; ".join(f"{name} = _own_{name}" for name in restored) + f"  # {magic}"
            )
        elif cell_magic("\n".join(below)) is not None:
            written.replace(cell.line, cell.line, "")
        else:
            written.replace(cell.line, cell.line, f"# {magic}")

    def _guarded(self, cell: _Read, below: list[str]) -> list[str]:
        """The code of some ranks, which shows its result itself: the last statement of the script's cell is the guard."""
        tree = cell.heard.tree
        if tree is None or not tree.body:
            written = self._written[cell.number]
            written.lines[cell.line - 1] = written.lines[cell.line - 1].replace(":  #", ": pass  #", 1)
            return below
        inside = begin_inside(tree)
        indented = [
            f"    {line}" if line.strip() and number not in inside else line
            for number, line in enumerate(below, start=cell.line + 1)
        ]
        result = result_of(cell.heard.python)
        if result is None or "get_ipython()" in ast.unparse(result):
            return indented
        self._written[cell.number].imports.append("from accelerate_nb.script.showing import shown")
        whole = edited("\n".join([*[""] * cell.line, *below]), showing(result, "shown")).split("\n")
        return [
            f"    {line}" if line.strip() and number not in inside else line
            for number, line in enumerate(whole[cell.line :], start=cell.line + 1)
        ]

    def _comment_all(self, cell: _Read) -> None:
        written = self._written[cell.number]
        for number, line in enumerate(written.lines, start=1):
            written.replace(number, number, f"# {line}".rstrip())

    # --------------------------------------------------------------------------------------------- cells with commands

    def _notebook_cell(self, cell: _Read) -> None:
        actions: dict[int, Action] = {}
        inside = set(_lines_in_functions(cell.heard.tree)) if cell.heard.tree is not None else set()
        for command in cell.heard.commands:
            try:
                action = self._command(cell, command, inside)
            except AccelerateNbError as error:
                self._problem(cell, command.first, str(error))
                continue
            if action is not None:
                actions[command.first] = action
        if cell.heard.tree is not None:
            self._flow.notebook_cell(cell.number, cell.heard.tree, actions)

    def _command(self, cell: _Read, command: Command, inside: set[int]) -> Action | None:
        """What a command means for the names that follow; how it is written is settled at the end."""
        if command.is_cell_magic:
            self._problem(
                cell,
                command.first,
                f"%%{NAME} stands below other lines. Put it into the first line of a cell of its own",
            )
            return None
        if not _HELP.isdisjoint({command.text.strip()}):
            self._leave_out(cell, command, "")
            return None
        word, rest = read_line(command.text)
        if word.word in _LEFT_OUT:
            self._leave_out(cell, command, _LEFT_OUT[word.word])
        elif command.first in inside:
            self._problem(
                cell,
                command.first,
                f"%{NAME} {word.word} stands in a function. Put it into a cell, outside of functions",
            )
        elif word.word in {"stop", "restart"}:
            self._stop(cell, command) if word.word == "stop" else self._restart(cell, command, rest)
        else:
            return getattr(self, f"_{word.word}")(cell, command, rest)  # type: ignore[no-any-return]  # push, pull or run
        return None

    def _stop(self, cell: _Read, command: Command) -> None:
        if self._asked.first is not None:
            self._asked.stopped = self._asked.stopped or (cell.number, command.first)
        self._comment(cell, command)

    def _restart(self, cell: _Read, command: Command, rest: str) -> None:
        said, words = read(rest, read_line("restart")[0].flags, f"%{NAME} restart")
        refuse(words, f"%{NAME} restart", "It takes flags of settings only.")
        begins = self._asked.first is None
        self._session(cell, command.first, said, fresh=True)
        if begins:
            # from here on the ranks draw their own random numbers
            self._written[cell.number].imports.append(f"from {_DRAWING} import session_begins")
            self._replace(cell, command, f"session_begins()  # %{NAME} {command.text}".rstrip())
        else:
            self._comment(cell, command)

    def _push(self, cell: _Read, command: Command, rest: str) -> Action:
        names = names_of(rest, f"%{NAME} push")
        self._session(cell, command.first, {})
        listed = ", ".join(names)
        self._import(cell, "push")
        self._replace(cell, command, f"{listed} = {self._called['push']}({listed})")
        return Push(tuple(names))

    def _pull(self, cell: _Read, command: Command, rest: str) -> Action:
        said, words = read(rest, read_line("pull")[0].flags, f"%{NAME} pull")
        wish, names = PullWish(**said), names_of(" ".join(words), f"%{NAME} pull")
        self._later.append(lambda: self._write_pull(cell, command, wish, names))
        return Pull(tuple(names))

    def _write_pull(self, cell: _Read, command: Command, wish: PullWish, names: Sequence[str]) -> None:
        place = (cell.number, command.first)
        again, kept = self._flow.from_kept.get(place, ()), self._flow.kept.get(place, ())
        listed = ", ".join(f"_own_{name}" if name in again else name for name in names)
        if place in self._flow.partial and not wish.all:
            self._import(cell, "pull_from")
            value = f"{self._called['pull_from']}({wish.rank or 0}, lambda: {_as_one(listed, len(names))})"
        else:
            self._import(cell, "pull")
            rank = "" if wish.rank is None else f", rank={wish.rank}"
            value = f"{self._called['pull']}({listed}{', every=True' if wish.all else rank})"
        text = f"{', '.join(names)} = {value}"
        if kept:
            # what the ranks have of their own is needed again below
            own = f"{', '.join(f'_own_{name}' for name in kept)} = {', '.join(kept)}"
            text = f"{own}; {text}"
        self._replace(cell, command, text)

    def _run(self, cell: _Read, command: Command, rest: str) -> Action | None:
        try:
            call: ast.expr | None = ast.parse(rest, mode="eval").body
        except SyntaxError:
            call = None
        if not isinstance(call, ast.Call):
            self._problem(cell, command.first, f"%{NAME} run was given {rest!r}, which is no call")
            return None
        self._session(cell, command.first, {})
        self._import(cell, "run")
        arguments = [*map(ast.unparse, call.args), *map(_unparsed, call.keywords)]
        before = cell.heard.source.split("\n")[command.first - 1].encode()[: command.column].decode()
        text = f"{self._called['run']}({', '.join([ast.unparse(call.func), *arguments])})"
        self._replace(cell, command, before.strip() + " " * bool(before.strip()) + text)
        return Call(call)

    # -------------------------------------------------------------------------------------------------------- writing

    def _session(self, cell: _Read, line: int, said: Mapping[str, Any], *, fresh: bool = False) -> None:
        """The cell needs the session."""
        is_first = self._asked.first is None
        if self._asked.stopped is not None:
            number, where = self._asked.stopped
            stop = Remark(
                where,
                f"the session is stopped here, and cell {cell.number} uses one again: a script's processes stay the same. "
                "Leave the stop out",
            )
            self._written[number].problems.append(stop)
            self._asked.stopped = None
            return
        if why := self._asked.ready(cell.number, said, fresh=fresh):
            self._problem(cell, line, why)
        if is_first:
            self._flow.session(cell.number)

    def _problem(self, cell: _Read, line: int, text: str) -> None:
        self._written[cell.number].problems.append(Remark(line, text.removesuffix(".") + "."))

    def _import(self, cell: _Read, name: str) -> None:
        called = self._called[name]
        also = "" if called == name else f" as {called}"
        statement = f"from {_VALUES} import {name}{also}"
        if statement not in (imports := self._written[cell.number].imports):
            imports.append(statement)

    def _replace(self, cell: _Read, command: Command, text: str) -> None:
        line = cell.heard.source.split("\n")[command.first - 1]
        indent = line[: len(line) - len(line.lstrip())]
        self._written[cell.number].replace(command.first, command.last, indent + text)

    def _comment(self, cell: _Read, command: Command) -> None:
        line = cell.heard.source.split("\n")[command.first - 1]
        # in a block there may be no other statement
        self._replace(cell, command, f"pass  # {line.strip()}" if line[:1].isspace() else f"# {line.strip()}")

    def _leave_out(self, cell: _Read, command: Command, why: str) -> None:
        text = f"%{NAME} {command.text}".rstrip()
        before = cell.heard.source.split("\n")[command.first - 1].encode()[: command.column].decode().strip()
        if before:
            self._problem(cell, command.first, f"{before} {text} keeps what a script does not have. Leave it out")
            return
        self._written[cell.number].notes.append(
            Remark(command.first, f"{text} was left out{f': {why}' if why else ''}.")
        )
        self._comment(cell, command)


def _spelled(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _unparsed(keyword: ast.keyword) -> str:
    value = ast.unparse(keyword.value)
    return f"**{value}" if keyword.arg is None else f"{keyword.arg}={value}"


def _as_one(listed: str, count: int) -> str:
    return listed if count == 1 else f"({listed})"


def _lines_in_functions(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)
