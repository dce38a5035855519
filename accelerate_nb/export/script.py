"""A notebook as the text of a script: each code cell as plain Python, what of it could not be one, and the lines around it."""

from __future__ import annotations

import ast
import builtins
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from accelerate_nb import __version__
from accelerate_nb.config.formats import literal
from accelerate_nb.config.magic_args import ranks_of, read, read_cell_line, read_line
from accelerate_nb.config.run_config import all_settings
from accelerate_nb.errors import ConfigurationError, ExportError
from accelerate_nb.export.magics import MAGICS, PlainCell, Remark, plain
from accelerate_nb.export.notebook import Notebook, NotebookCell
from accelerate_nb.export.parameters import TAG, Parameter, Parameters, parameters_of
from accelerate_nb.export.python_source import (
    GUARD,
    INDENT,
    DefinitionFinder,
    bound,
    edited,
    guarded,
    hoisted,
    looked_up,
    mentioned,
    result_of,
    showing,
    without_annotations,
)
from accelerate_nb.sources.cells import added, first_line, marker, table

# A run of the notebook leaves the values that it was given in a cell, as papermill does: a script is given its own.
_NOT_IN_SCRIPTS = frozenset({"remove-script", "skip-script", "injected-parameters"})
_HEADING = re.compile(r"^#{1,6} +(.+?)(?: +#+)? *$", re.MULTILINE)
# How a notebook shows a session; a terminal has ways of its own.
_OF_NOTEBOOKS = frozenset({"panel", "report"})
# Settings that a session adopts from the next cell on, without a restart.
_FOLLOWED = frozenset({"panel", "report", "hang_warning_after", "stop_grace_period", "log_line_prefix_template"})
RAISES = "raises-exception"
# `_` is the last result, `_3` and `Out[3]` those of cell 3, `In` the texts of the cells.
_PAST_RESULT = re.compile(r"_{1,3}|_i{0,3}\d*|Out|In|_[oi]h")


@dataclass(frozen=True, slots=True)
class ExportedScript:
    """The text of a script, its notes for the user, and its options."""

    text: str
    notes: tuple[str, ...] = ()
    parameters: tuple[Parameter, ...] = ()


def as_script(notebook: Notebook, *, keep_installs: bool = False) -> ExportedScript:
    """
    The notebook as a script; `ExportError` names every cell and line that can't be in one.

    With `keep_installs` the script runs `%pip install` and its like too.

    >>> as_script(read("train.ipynb")).text
    """
    name = re.sub(r"[\x00-\x1f\x7f\u2028\u2029]", "?", notebook.path.name)
    kept = (cell for cell in notebook.cells if not cell.tags & _NOT_IN_SCRIPTS)
    cells = tuple(replace(cell, source=cell.source.rstrip()) for cell in kept)
    translation = translated(cells, keep_installs=keep_installs)
    if problems := translation.problems():
        raise ExportError(_refusal(name, problems))
    text = _ScriptWriter(name, cells, translation).text()
    _check(text, name)
    parameters = next((item.parameters for item in translation.cells.values() if item.parameters), ())
    return ExportedScript(text, tuple(_described(name, translation.notes())), parameters)


def _refusal(name: str, problems: Sequence[tuple[int, Remark]]) -> str:
    lines = "\n".join(f"  {line}" for line in _described(name, problems))
    return f"{name} can't be a script as it is:\n{lines}\nChange these lines, or tag their cells `skip-script`."


def _described(name: str, remarks: Iterable[tuple[int, Remark]]) -> Iterator[str]:
    for number, remark in remarks:
        yield f"{name}, cell {number}, line {remark.line}: {remark.text}"


def _check(text: str, name: str) -> None:
    """The script is Python: what only goes wrong once cells stand together is found before anyone runs it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of the same things when the script runs
            compile(text, name, "exec", dont_inherit=True)
    except SyntaxError as error:
        position = table(text.split("\n")).get(error.lineno or 0, f"{name}, line {error.lineno} of the script")
        raise ExportError(
            f"{position}: {error.msg}: `{(error.text or '').strip()}`. A script can't hold this."
        ) from None


class _ScriptWriter:
    """The script while it is written."""

    def __init__(self, name: str, cells: Sequence[NotebookCell], translation: NotebookTranslation) -> None:
        self._name = name
        self._cells = cells
        self._translation, self._session = translation, translation.session
        self._imports: dict[str, None] = {}
        self._definitions = DefinitionFinder()
        self._taken = _names(translation.cells.values())

    def text(self) -> str:
        """The whole text."""
        naming = self._function("error_locations", "name_in_tracebacks")
        options = self._options_line()
        begins = [f"{naming}(__file__)", f"{self._function('shared_seed', 'alike')}(__file__)"]
        if self._session is not None:
            shared = [f"{name}={literal(value)}" for name, value in self._session.items() if name not in _OF_NOTEBOOKS]
            begins.append(f"{self._function('ranks', 'begin')}({', '.join(['__file__', *shared])})")
        if self._uses_display():
            self._imports["from accelerate_nb.script.display import display"] = None
        body = [line for cell in self._cells for line in self._lines(cell)]
        futures = {name: None for cell in self._translation.cells.values() for name in cell.futures}
        from_future = [f"from __future__ import {', '.join(futures)}"] if futures else []
        imports = [*from_future, *_merged(self._imports)]
        # a wrong option is an error before the script begins, and before it starts processes
        below_guard = (added(INDENT + line) for line in begins)
        top = [*self._header(), *map(added, [*imports, *options, GUARD]), *below_guard]
        return "\n".join([*top, *body]) + "\n"

    def _header(self) -> Iterator[str]:
        script = self._name.removesuffix(".ipynb") + ".py"
        plays = "rank 0 plays the notebook, and all ranks run their cells"
        ways = [
            (f"python {script}", "one process, or as many as the notebook starts"),
            (f"accelerate-nb launch -n 2 {script}", "every process runs all of it" if self._session is None else plays),
            (f"torchrun --nproc-per-node 2 {script}", "the same"),
        ]
        widest = max(len(command) for command, _ in ways)
        yield first_line(self._name, __version__)
        yield "#"
        yield from (f"#     {command:{widest}}    {meaning}" for command, meaning in ways)
        yield "#"
        yield '# Lines that end in "# +" are none of the notebook\'s.'

    def _lines(self, cell: NotebookCell) -> Iterator[str]:
        if cell.kind == "markdown" and cell.source.strip():
            yield from ("", marker(self._name, None))
            yield from (f"# {line}".rstrip() for line in cell.source.split("\n"))
        elif cell.number is not None:
            item = self._translation.cells[cell.number]
            yield from ("", marker(self._name, cell.number))
            yield from self._code(item)
            yield from self._chosen(item)

    def _code(self, translated_cell: TranslatedCell) -> list[str]:
        if translated_cell.plain.left_out:
            return [f"# {line}".rstrip() for line in translated_cell.plain.source.split("\n")]
        self._imports.update(dict.fromkeys(translated_cell.plain.imports))
        source = translated_cell.plain.source
        if (result := result_of(source, translated_cell.cell.source)) is not None:
            source = edited(source, showing(result, self._function("display", "shown")))
        waits = lambda: self._function("top_level_await", "wait")  # noqa: E731 - imported only where something waits
        return guarded(source, translated_cell.number, self._definitions, waits, shown=result is not None)

    def _options_line(self) -> list[str]:
        """The lines that read the options, in the script and in the processes that import it for its data loaders."""
        options = [option for cell in self._translation.cells.values() for option in cell.parameters]
        if not options:
            return []
        self._options = self._free("options")
        entries = [f"{INDENT}{item.name}=({item.type!r}, {item.default!r}, {item.help!r})," for item in options]
        read = self._function("options", "parameters")
        return [f"{self._options} = {read}(", f"{INDENT}__name__, __file__, {self._heading()!r},", *entries, ")"]

    def _chosen(self, translated_cell: TranslatedCell) -> list[str]:
        """The lines that give the names of the `parameters` cell the values of the options."""
        names = ", ".join(parameter.name for parameter in translated_cell.parameters)
        comma = "," if len(translated_cell.parameters) == 1 else ""
        return [added(f"{names}{comma} = {self._options}.instead_of({names})")] if names else []

    def _heading(self) -> str:
        sources = (cell.source for cell in self._cells if cell.kind == "markdown")
        return next((found[1] for source in sources if (found := _HEADING.search(source))), self._name)

    def _function(self, home: str, name: str) -> str:
        """The name of one of this package's functions in this script, where the notebook may use its name for something else."""
        called = self._free(name)
        behind = "" if called == name else f" as {called}"
        self._imports[f"from accelerate_nb.script.{home} import {name}{behind}"] = None
        return called

    def _free(self, name: str) -> str:
        while name in self._taken:
            name = f"_{name}"
        return name

    def _uses_display(self) -> bool:
        """Whether a cell uses `display`, which every notebook has, before any cell imports it."""
        for cell in self._translation.cells.values():
            if "display" in bound(cell.tree.body):
                return False
            if "display" in mentioned(cell.tree):
                return True
        return False


def _names(cells: Iterable[TranslatedCell]) -> set[str]:
    """The names that a notebook uses itself; those that stand for IPython's syntax are none of them."""
    taken: set[str] = set()
    for cell in cells:
        ours = bound(ast.parse("\n".join(cell.plain.imports)).body)
        taken |= bound(cell.tree.body) | (mentioned(cell.tree) - ours)
    return taken


def _merged(imports: Iterable[str]) -> list[str]:
    """These imports, with one line for each module."""
    names: dict[str, dict[str, None]] = {}
    others = []
    for line in imports:
        module, word, imported = line.removeprefix("from ").partition(" import ")
        if word and line.startswith("from "):
            names.setdefault(module, {})[imported] = None
        else:
            others.append(line)
    return [*others, *(f"from {module} import {', '.join(sorted(names[module]))}" for module in sorted(names))]


# --------------------------------------------------------------------------------------------------- cells as Python


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
