"""Translation of `%%accelerate` cells and `%accelerate` lines into a script that every process runs as a whole."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accelerate_nb.config.magic_args import (
    CellOptions,
    PullOptions,
    names_of,
    ranks_of,
    read,
    read_cell_line,
    read_line,
    refuse,
)
from accelerate_nb.errors import AccelerateNbError
from accelerate_nb.export.edits import begin_inside, edited
from accelerate_nb.export.last_value import result_of, showing
from accelerate_nb.export.magics import cell_magic
from accelerate_nb.export.notebook import NotebookCell
from accelerate_nb.export.rank_cells.bound_names import bound
from accelerate_nb.export.rank_cells.find import NAME, AccelerateLine, CellCommands, parse_commands
from accelerate_nb.export.rank_cells.name_conflicts import ConflictFinder
from accelerate_nb.export.rank_cells.rng_streams import Whose
from accelerate_nb.export.rank_cells.session_requests import SessionRequests
from accelerate_nb.export.rank_cells.statement_walker import Action, PullLine, PushLine, RunLine
from accelerate_nb.export.translated_cell import PlainCell, RankCells, Remark

_MENTIONED = re.compile(rf"%{NAME}\b")
_HELP = frozenset({"-h", "--help", "help"})
_VALUES = "accelerate_nb.script.exchange"
_DRAWING = "accelerate_nb.script.rng_streams"
# What a script has no use for, and why.
_LEFT_OUT = {
    "status": "",
    "stacks": "",
    "logs": "",
    "wait": "a script's cells wait for each other anyway",
    "interrupt": "a script's cells wait for each other anyway",
    "runs": "",
    "config": "pass the settings to %%accelerate, or to accelerate-nb launch",
}


def ranked(cells: Sequence[NotebookCell]) -> RankCells:
    r"""
    The translation of a notebook's cells on ranks; a notebook without them stays as it is.

    >>> ranked([NotebookCell("code", "%%accelerate -n 2\nprint(rank)", 1)]).needed
    'num_processes=2'
    """
    code = [cell for cell in cells if cell.kind == "code" and cell.number is not None]
    if not any(_MENTIONED.search(cell.source) for cell in code):
        return RankCells()
    return _RankCellTranslator([_CellOptions.of(cell) for cell in code]).ranked()


@dataclass(frozen=True, slots=True)
class _CellOptions:
    """A cell, with its `%%accelerate` line where it runs on ranks."""

    number: int
    source: str
    parsed: CellCommands
    line: int = 0
    flags: str | None = None

    @classmethod
    def of(cls, cell: NotebookCell) -> _CellOptions:
        assert cell.number is not None
        lines = cell.source.split("\n")
        magic = cell_magic(lines)
        if magic is None or magic.name != NAME:
            return cls(cell.number, cell.source, parse_commands(cell.source))
        below = parse_commands("\n".join([*[""] * magic.line, *lines[magic.line :]]))
        return cls(cell.number, cell.source, below, magic.line, magic.rest)


@dataclass
class _CellDraft:
    """The translation of a cell so far."""

    lines: list[str]
    imports: list[str] = field(default_factory=list)
    notes: list[Remark] = field(default_factory=list)
    problems: list[Remark] = field(default_factory=list)
    is_changed: bool = False

    def replace(self, first: int, last: int, text: str) -> None:
        """Replace some lines by one; the others become empty comments."""
        self.lines[first - 1 : last] = [text, *["#"] * (last - first)]
        self.is_changed = True

    def plain(self) -> PlainCell:
        """The cell."""
        return PlainCell("\n".join(self.lines), tuple(self.imports), tuple(self.notes), tuple(self.problems))


class _RankCellTranslator:
    """The cells, followed in order and then written."""

    def __init__(self, cells: Sequence[_CellOptions]) -> None:
        self._cells = cells
        self._requests = SessionRequests()
        self._flow = ConflictFinder()
        self._whose: dict[int, Whose] = {}
        self._written = {cell.number: _CellDraft(cell.parsed.source.split("\n")) for cell in cells}
        self._deferred: list[Callable[[], None]] = []
        taken = {name for cell in cells if cell.parsed.tree is not None for name in bound(cell.parsed.tree.body)}
        self._called = {name: f"_{name}" if name in taken else name for name in ("push", "pull", "pull_from", "run")}

    def ranked(self) -> RankCells:
        """All of it."""
        for cell in self._cells:
            self._rank_cell(cell) if cell.flags is not None else self._notebook_cell(cell)
        # only now it is known which names are needed again
        for write in self._deferred:
            write()
        for finding in self._flow.problems:
            self._written[finding.cell].problems.append(Remark(finding.line, finding.text))
        for finding in self._flow.notes:
            self._written[finding.cell].notes.append(Remark(finding.line, finding.text))
        others = [(number, item) for number, item in self._written.items() if not item.is_changed]
        return RankCells(
            {number: item.plain() for number, item in self._written.items() if item.is_changed},
            None if self._requests.first is None else self._requests.needed(),
            self._requests.first,
            self._whose,
            tuple((number, remark) for number, other in others for remark in other.notes),
            tuple((number, remark) for number, other in others for remark in other.problems),
        )

    # -------------------------------------------------------------------------------------------------- cells of ranks

    def _rank_cell(self, cell: _CellOptions) -> None:
        assert cell.flags is not None
        written = self._written[cell.number]
        written.lines = cell.source.split("\n")
        if _HELP & set(cell.flags.split()):
            for number, line in enumerate(written.lines, start=1):
                written.replace(number, number, f"# {line}".rstrip())
            return
        try:
            options, given = read_cell_line(cell.flags)
            ranks = ranks_of(options.ranks, {**self._requests.settings, **given}.get("num_processes"))
        except AccelerateNbError as error:
            self._problem(cell, cell.line, str(error))
            return
        self._session(cell, cell.line, given, restart=options.restart)
        self._check(cell, options, ranks)
        self._whose[cell.number] = "both" if options.local else "ranks"
        if cell.parsed.tree is not None:
            # a cell magic below has to stay the first that is not empty, and a guard can't take a second one
            restores = ranks is None and cell_magic(written.lines[cell.line :]) is None
            self._flow.rank_cell(
                cell.number, cell.parsed.tree, local=options.local, part=ranks is not None, restores=restores
            )
        self._deferred.append(lambda: self._write_rank_cell(cell, ranks))

    def _check(self, cell: _CellOptions, options: CellOptions, ranks: tuple[int, ...] | None) -> None:
        written = self._written[cell.number]
        if ranks is not None and options.local:
            text = "--ranks and --local were both given, but a script's processes are the notebook and the ranks in one"
            self._problem(cell, cell.line, f"{text}. Leave one of them out")
        for is_given, what in ((options.background, "--background"), (options.timeout is not None, "--timeout")):
            if is_given:
                text = f"{what} was left out: a script's cells run one after the other"
                written.notes.append(Remark(cell.line, text))
        if options.detach:
            text = "--detach was left out: pass it to accelerate-nb launch, for all of the script"
            written.notes.append(Remark(cell.line, text))
        for command in cell.parsed.commands:
            self._problem(cell, command.first, f"%{NAME} is in a %%{NAME} cell, where no rank knows it")

    def _write_rank_cell(self, cell: _CellOptions, ranks: tuple[int, ...] | None) -> None:
        written = self._written[cell.number]
        magic, below = written.lines[cell.line - 1].strip(), written.lines[cell.line :]
        if cell.number in self._flow.uses_class:
            written.imports.append("from accelerate_nb import Accelerator")
        if ranks is not None:
            guard = f"({', '.join(map(str, ranks))}{',' * (len(ranks) == 1)})"
            written.replace(cell.line, cell.line, f"if rank in {guard}:  # {magic}")
            written.lines[cell.line :] = self._guarded(cell, below)
        elif restored := self._flow.restored.get(cell.number):
            own_names = "; ".join(f"{name} = _own_{name}" for name in restored)
            written.replace(cell.line, cell.line, f"{own_names}  # {magic}")
        elif cell_magic(below) is not None:
            written.replace(cell.line, cell.line, "")
        else:
            written.replace(cell.line, cell.line, f"# {magic}")

    def _guarded(self, cell: _CellOptions, below: list[str]) -> list[str]:
        """The code of some ranks, which shows its result itself: the last statement of the script's cell is the guard."""
        tree = cell.parsed.tree
        if tree is None or not tree.body:
            written = self._written[cell.number]
            written.lines[cell.line - 1] = written.lines[cell.line - 1].replace(":  #", ": pass  #", 1)
            return below
        inside, result = begin_inside(tree), result_of(cell.parsed.python)
        if result is not None and "get_ipython()" not in ast.unparse(result):
            self._written[cell.number].imports.append("from accelerate_nb.script.display import shown")
            whole = edited("\n".join([*[""] * cell.line, *below]), showing(result, "shown")).split("\n")
            below = whole[cell.line :]
        return [
            f"    {line}" if line.strip() and number not in inside else line
            for number, line in enumerate(below, start=cell.line + 1)
        ]

    # --------------------------------------------------------------------------------------------- cells with commands

    def _notebook_cell(self, cell: _CellOptions) -> None:
        actions: dict[int, Action] = {}
        inside = set(_lines_in_functions(cell.parsed.tree)) if cell.parsed.tree is not None else set()
        for command in cell.parsed.commands:
            try:
                action = self._command(cell, command, inside)
            except AccelerateNbError as error:
                self._problem(cell, command.first, str(error))
                continue
            if action is not None:
                actions[command.first] = action
        if cell.parsed.tree is not None:
            self._flow.notebook_cell(cell.number, cell.parsed.tree, actions)

    def _command(self, cell: _CellOptions, command: AccelerateLine, inside: set[int]) -> Action | None:
        """The effect of a command on the names that follow; its text is decided at the end."""
        if command.is_cell_magic:
            text = f"%%{NAME} is below other lines. Put it into the first line of a cell of its own"
            self._problem(cell, command.first, text)
            return None
        if not _HELP.isdisjoint({command.text.strip()}):
            self._leave_out(cell, command, "")
            return None
        word, rest = read_line(command.text)
        if word.word in _LEFT_OUT:
            self._leave_out(cell, command, _LEFT_OUT[word.word])
        elif command.first in inside:
            text = f"%{NAME} {word.word} is in a function. Put it into a cell, outside of functions"
            self._problem(cell, command.first, text)
        elif word.word in {"stop", "restart"}:
            self._stop(cell, command) if word.word == "stop" else self._restart(cell, command, rest)
        else:
            return getattr(self, f"_{word.word}")(cell, command, rest)  # type: ignore[no-any-return]  # push, pull or run
        return None

    def _stop(self, cell: _CellOptions, command: AccelerateLine) -> None:
        if self._requests.first is not None:
            self._requests.stopped = self._requests.stopped or (cell.number, command.first)
        self._comment(cell, command)

    def _restart(self, cell: _CellOptions, command: AccelerateLine, rest: str) -> None:
        given, words = read(rest, read_line("restart")[0].flags, f"%{NAME} restart")
        refuse(words, f"%{NAME} restart", "It takes flags of settings only.")
        begins = self._requests.first is None
        self._session(cell, command.first, given, restart=True)
        if begins:
            # from here on the ranks draw their own random numbers
            self._written[cell.number].imports.append(f"from {_DRAWING} import session_begins")
            self._replace(cell, command, f"session_begins()  # %{NAME} {command.text}".rstrip())
        else:
            self._comment(cell, command)

    def _push(self, cell: _CellOptions, command: AccelerateLine, rest: str) -> Action:
        names = names_of(rest, f"%{NAME} push")
        self._session(cell, command.first, {})
        listed = ", ".join(names)
        self._import(cell, "push")
        self._replace(cell, command, f"{listed} = {self._called['push']}({listed})")
        return PushLine(tuple(names))

    def _pull(self, cell: _CellOptions, command: AccelerateLine, rest: str) -> Action:
        given, words = read(rest, read_line("pull")[0].flags, f"%{NAME} pull")
        options, names = PullOptions(**given), names_of(" ".join(words), f"%{NAME} pull")
        self._deferred.append(lambda: self._write_pull(cell, command, options, names))
        return PullLine(tuple(names))

    def _write_pull(
        self, cell: _CellOptions, command: AccelerateLine, options: PullOptions, names: Sequence[str]
    ) -> None:
        position = (cell.number, command.first)
        again, kept = self._flow.from_kept.get(position, ()), self._flow.kept.get(position, ())
        listed = ", ".join(f"_own_{name}" if name in again else name for name in names)
        if position in self._flow.partial and not options.all:
            self._import(cell, "pull_from")
            values = listed if len(names) == 1 else f"({listed})"
            value = f"{self._called['pull_from']}({options.rank or 0}, lambda: {values})"
        else:
            self._import(cell, "pull")
            rank = "" if options.rank is None else f", rank={options.rank}"
            value = f"{self._called['pull']}({listed}{', every=True' if options.all else rank})"
        text = f"{', '.join(names)} = {value}"
        if kept:
            # what the ranks have of their own is needed again below
            saved = f"{', '.join(f'_own_{name}' for name in kept)} = {', '.join(kept)}"
            text = f"{saved}; {text}"
        self._replace(cell, command, text)

    def _run(self, cell: _CellOptions, command: AccelerateLine, rest: str) -> Action | None:
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
        before = cell.parsed.source.split("\n")[command.first - 1].encode()[: command.column].decode()
        text = f"{self._called['run']}({', '.join([ast.unparse(call.func), *arguments])})"
        self._replace(cell, command, before.strip() + " " * bool(before.strip()) + text)
        return RunLine(call)

    # -------------------------------------------------------------------------------------------------------- writing

    def _session(self, cell: _CellOptions, line: int, given: Mapping[str, Any], *, restart: bool = False) -> None:
        """The cell needs the session."""
        is_first = self._requests.first is None
        if self._requests.stopped is not None:
            number, where = self._requests.stopped
            stop = Remark(
                where,
                f"the session is stopped here, and cell {cell.number} uses one again: a script's processes stay the same. "
                "Leave the stop out",
            )
            self._written[number].problems.append(stop)
            self._requests.stopped = None
            return
        if why := self._requests.ready(cell.number, given, restart=restart):
            self._problem(cell, line, why)
        if is_first:
            self._flow.session(cell.number)

    def _problem(self, cell: _CellOptions, line: int, text: str) -> None:
        self._written[cell.number].problems.append(Remark(line, text.removesuffix(".") + "."))

    def _import(self, cell: _CellOptions, name: str) -> None:
        called = self._called[name]
        also = "" if called == name else f" as {called}"
        statement = f"from {_VALUES} import {name}{also}"
        if statement not in (imports := self._written[cell.number].imports):
            imports.append(statement)

    def _replace(self, cell: _CellOptions, command: AccelerateLine, text: str) -> None:
        line = cell.parsed.source.split("\n")[command.first - 1]
        indent = line[: len(line) - len(line.lstrip())]
        self._written[cell.number].replace(command.first, command.last, indent + text)

    def _comment(self, cell: _CellOptions, command: AccelerateLine) -> None:
        line = cell.parsed.source.split("\n")[command.first - 1]
        # in a block there may be no other statement
        self._replace(cell, command, f"pass  # {line.strip()}" if line[:1].isspace() else f"# {line.strip()}")

    def _leave_out(self, cell: _CellOptions, command: AccelerateLine, why: str) -> None:
        text = f"%{NAME} {command.text}".rstrip()
        before = cell.parsed.source.split("\n")[command.first - 1].encode()[: command.column].decode().strip()
        if before:
            self._problem(cell, command.first, f"{before} {text} keeps what a script does not have. Leave it out")
            return
        note = f"{text} was left out{f': {why}' if why else ''}."
        self._written[cell.number].notes.append(Remark(command.first, note))
        self._comment(cell, command)


def _unparsed(keyword: ast.keyword) -> str:
    value = ast.unparse(keyword.value)
    return f"**{value}" if keyword.arg is None else f"{keyword.arg}={value}"


def _lines_in_functions(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)
