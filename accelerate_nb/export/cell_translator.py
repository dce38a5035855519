"""Each code cell as Python that could stand in a script, and what of it could not."""

from __future__ import annotations

import ast
import builtins
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from accelerate_nb.config.magic_args import ranks_of, read, read_cell_line, read_line
from accelerate_nb.config.run_config import all_settings
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.export.magics import MAGICS, PlainCell, Remark, plain
from accelerate_nb.export.main_guard import without_annotations
from accelerate_nb.export.notebook import NotebookCell
from accelerate_nb.export.parameters import TAG, Parameter, Parameters, parameters_of
from accelerate_nb.export.python_source import bound, hoisted, looked_up

# Settings that a session adopts from the next cell on, without a restart.
_FOLLOWED = frozenset({"panel", "report", "hang_warning_after", "stop_grace_period", "log_line_prefix_template"})
RAISES = "raises-exception"
# `_` is the last result, `_3` and `Out[3]` those of cell 3, `In` the texts of the cells.
_PAST_RESULT = re.compile(r"_{1,3}|_i{0,3}\d*|Out|In|_[oi]h")


@dataclass(frozen=True, slots=True)
class TranslatedCell:
    """A code cell in plain Python, with as many lines; a cell that is left out is text, and parses as nothing."""

    cell: NotebookCell
    plain: PlainCell
    futures: tuple[str, ...] = ()
    parameters: tuple[Parameter, ...] = ()

    @property
    def number(self) -> int:
        """The cell's number; cells without one are not translated."""
        assert self.cell.number is not None
        return self.cell.number

    @property
    def tree(self) -> ast.Module:
        """Its statements."""
        return ast.parse("" if self.plain.left_out else self.plain.source)


@dataclass(frozen=True, slots=True)
class NotebookTranslation:
    """All code cells of a notebook, by number, with the settings of its `%%accelerate` cells; `None` where it has none."""

    cells: dict[int, TranslatedCell]
    session: dict[str, Any] | None
    session_problems: tuple[tuple[int, Remark], ...] = ()

    def notes(self) -> list[tuple[int, Remark]]:
        """Notes for the user, with the numbers of the cells, in the order of the lines."""
        return sorted(((cell.number, note) for cell in self.cells.values() for note in cell.plain.notes), key=_position)

    def problems(self) -> list[tuple[int, Remark]]:
        """Problems that prevent an export, with the numbers of the cells, in the order of the lines."""
        found = [(cell.number, problem) for cell in self.cells.values() for problem in cell.plain.problems]
        tagged = [number for number, cell in self.cells.items() if TAG in cell.cell.tags]
        second = "is tagged `parameters` already; a script has its options from one cell."
        found += [(number, Remark(1, f"cell {tagged[0]} {second}")) for number in tagged[1:]]
        return sorted([*found, *self.session_problems, *self._names_of_ipython()], key=_position)

    def _names_of_ipython(self) -> Iterator[tuple[int, Remark]]:
        """What only IPython knows, and no cell defines: its past results, and magics that read like Python."""
        sound = [cell for cell in self.cells.values() if not cell.plain.problems]
        defined = {name for item in sound for name in bound(item.tree.body)}
        for item in sound:
            for name, line in _past_results_of(item.tree.body).items():
                if name not in defined:
                    what = f"`{name}` is what IPython keeps of other cells; give the value a name where it is computed"
                    yield item.number, Remark(line, f"{what}.")
            # a cell of `ls -la` is a difference to Python, and a magic to IPython while nothing is called `ls`
            source = item.plain.source.strip()
            word = re.split(r"\W", source, maxsplit=1)[0]
            is_magic = word in MAGICS and "\n" not in source and word in looked_up(item.tree.body)
            if is_magic and not {word, "*"} & defined and not hasattr(builtins, word):
                line = item.plain.source[: item.plain.source.index(source)].count("\n") + 1
                yield item.number, Remark(line, f"nothing is called `{word}`, so it is a magic: write `%{source}`.")


def _past_results_of(nodes: Iterable[ast.stmt]) -> dict[str, int]:
    """Names that IPython keeps results under, and the first lines that they stand on."""
    lines: dict[str, int] = {}
    for node in nodes:
        found = {name for name in looked_up([node]) if _PAST_RESULT.fullmatch(name)}
        for part in ast.walk(node) if found else ():
            if isinstance(part, ast.Name) and part.id in found:
                lines.setdefault(part.id, part.lineno)
    return lines


def translated(cells: Sequence[NotebookCell], *, keep_installs: bool = False) -> NotebookTranslation:
    """Translate the code cells among these; nothing is raised, problems are kept."""
    found = {cell.number: _translated(cell, keep_installs) for cell in cells if cell.number is not None}
    return NotebookTranslation(found, *_session_of(found.values()))


def _translated(cell: NotebookCell, keep_installs: bool) -> TranslatedCell:
    if RAISES in cell.tags:
        note = Remark(1, f"the cell was left out: it is tagged `{RAISES}`, and would end the script.")
        return TranslatedCell(cell, PlainCell(cell.source, notes=(note,), left_out=True))
    found = plain(cell.source, keep_installs=keep_installs)
    if found.left_out or found.problems:
        return TranslatedCell(cell, found)
    try:
        return _checked(cell, found)
    except SyntaxError as error:
        line = error.lineno or 1
        text = found.source.split("\n")[line - 1].strip()
        problem = Remark(line, f"`{text}` is no Python: {error.msg}.")
        return TranslatedCell(cell, replace(found, problems=(problem,)))


def _session_of(cells: Iterable[TranslatedCell]) -> tuple[dict[str, Any] | None, tuple[tuple[int, Remark], ...]]:
    """The settings of the session that cells request, one after the other, and what a script's processes can't be."""
    settings: dict[str, Any] | None = None
    defaults = {setting.name: setting.default for setting in all_settings()}
    stopped: tuple[int, int] | None = None
    problems: list[tuple[int, Remark]] = []
    for number, line in ((cell.number, line) for cell in cells for line in cell.plain.on_ranks):
        if line.text.startswith("%%"):
            options, given = read_cell_line(line.text[2:])
            restarts, ranks = options.restart, options.ranks
        else:
            command, rest = read_line(line.text)
            given = read(rest, command.flags, "%accelerate restart")[0] if command.word == "restart" else {}
            restarts, ranks = command.word == "restart", None
            if command.word == "stop":
                stopped = None if settings is None else stopped or (number, line.line)
                continue
            if command.word == "pull" and settings is None:
                continue
        if stopped is not None:
            text = f"the session is stopped here, and cell {number} uses one again: a script's processes stay the same. Leave the stop out."
            problems.append((stopped[0], Remark(stopped[1], text)))
            stopped = None
        known = given if settings is None else settings
        changed = [
            name for name, value in given.items() if known.get(name, defaults[name]) != value and name not in _FOLLOWED
        ]
        why = ""
        if restarts and settings is not None:
            why = "the session would restart here, and the variables of a script's processes can't be forgotten."
        elif changed:
            was, now = known.get(changed[0], defaults[changed[0]]), given[changed[0]]
            why = (
                f"the session would restart here ({changed[0]} was {was} and is {now} now), and a script's processes stay the same. "
                "Set it in the first %%accelerate cell."
            )
        settings = {**given, **known, **({} if why else given)}
        try:
            ranks_of(ranks, settings.get("num_processes"))
        except ConfigurationError as error:
            why = why or str(error)
        problems += [(number, Remark(line.line, why))] if why else []
    return settings, tuple(problems)


def _checked(cell: NotebookCell, found: PlainCell) -> TranslatedCell:
    """The cell as the script has it; `SyntaxError` where Python could not run it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of the same things when the script runs
        source, futures = hoisted(found.source)
        compile(source, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        source = without_annotations(source)
        options = parameters_of(source) if TAG in cell.tags else Parameters()
    problems = (*found.problems, *options.problems)
    return TranslatedCell(cell, replace(found, source=source, problems=problems), futures, options.found)


def _position(remark: tuple[int, Remark]) -> tuple[int, int]:
    number, note = remark
    return number, note.line
