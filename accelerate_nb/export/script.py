"""A notebook as the text of a script: each code cell as plain Python, what of it could not be one, and the lines around it."""

import ast
import builtins
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from accelerate_nb import __version__
from accelerate_nb.config.formats import literal
from accelerate_nb.config.magic_args import ADJUSTABLE_SETTINGS, ranks_of, read, read_cell_line, read_line
from accelerate_nb.config.run_config import all_settings
from accelerate_nb.errors import ConfigurationError, ExportError
from accelerate_nb.export import python_source
from accelerate_nb.export.magics import MAGICS, PlainCell, Remark, plain, wrong_python
from accelerate_nb.export.notebook import Notebook, NotebookCell
from accelerate_nb.export.parameters import TAG, Parameter, parameters_of
from accelerate_nb.sources.cells import added, first_line, marker, table

# A run of the notebook leaves the values that it was given in a cell, as papermill does: a script is given its own.
_NOT_IN_SCRIPTS = frozenset({"remove-script", "skip-script", "injected-parameters"})
_HEADING = re.compile(r"^#{1,6} +(.+?)(?: +#+)? *$", re.MULTILINE)
# How a notebook shows a session; a terminal has ways of its own.
_OF_NOTEBOOKS = frozenset({"panel", "report"})
RAISES = "raises-exception"
# `_` is the last result, `_3` and `Out[3]` those of cell 3, `In` the texts of the cells.
_PAST_RESULT = re.compile(r"_{1,3}|_i{0,3}\d*|Out|In|_[oi]h")
_LAUNCHER = "notebook_launcher"
_RUN_BY_PYTHON = (
    "accelerate's notebook_launcher starts processes of its own, so run the script with python. To run it with a launcher "
    "too, import notebook_launcher from accelerate_nb."
)


@dataclass(frozen=True, slots=True)
class ExportedScript:
    """The text of a script, its notes for the user, and its options."""

    text: str
    notes: tuple[str, ...] = ()
    parameters: tuple[Parameter, ...] = ()


def as_script(notebook: Notebook, *, keep_installs: bool = False) -> ExportedScript:
    """The notebook as a script; `ExportError` names every cell and line that can't be in one."""
    # with `keep_installs` the script runs `%pip install` and its like too
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of the same things when the script runs
        name = re.sub(r"[\x00-\x1f\x7f\u2028\u2029]", "?", notebook.path.name)
        cells = [
            replace(cell, source=cell.source.rstrip()) for cell in notebook.cells if not cell.tags & _NOT_IN_SCRIPTS
        ]
        translation = NotebookTranslation(name, cells, keep_installs=keep_installs)
        if problems := translation.problems():
            lines = "\n".join(f"  {line}" for line in _described(name, problems))
            raise ExportError(
                f"{name} can't be a script as it is:\n{lines}\nChange these lines, or tag their cells `skip-script`."
            )
        text = translation.text()
        try:
            # what only goes wrong once cells stand together is found before anyone runs it
            compile(text, name, "exec", dont_inherit=True)
        except SyntaxError as error:
            position = table(text.split("\n")).get(error.lineno or 0, f"{name}, line {error.lineno} of the script")
            wrong = f"{error.msg}: `{(error.text or '').strip()}`"
            raise ExportError(f"{position}: {wrong}. A script can't hold this.") from None
        return ExportedScript(text, tuple(_described(name, translation.notes())), translation.parameters)


def _described(name: str, remarks: Iterable[tuple[int, Remark]]) -> Iterator[str]:
    for number, remark in remarks:
        yield f"{name}, cell {number}, line {remark.line}: {remark.text}"


class NotebookTranslation:
    """The cells of a notebook as a script."""

    # `cells` are the code cells by number, `session` the settings of %%accelerate cells; `None` where there are none

    def __init__(self, name: str, cells: Sequence[NotebookCell], *, keep_installs: bool = False) -> None:
        self._name, self._all_cells, self._keep_installs = name, cells, keep_installs
        self._definitions = python_source.DefinitionFinder()
        self._futures: dict[str, None] = {}
        self.parameters: tuple[Parameter, ...] = ()
        self.cells = {cell.number: self._translated(cell) for cell in cells if cell.number is not None}
        self.session, self._session_problems = _session_of(self.cells)

    def _translated(self, cell: NotebookCell) -> PlainCell:
        """A code cell in plain Python, with as many lines; its imports from the future and its parameters are kept apart."""
        if RAISES in cell.tags:
            note = Remark(1, f"the cell was left out: it is tagged `{RAISES}`, and would end the script.")
            return PlainCell(cell.source, notes=(note,), left_out=True)
        found = plain(cell.source, keep_installs=self._keep_installs)
        if found.left_out or found.problems:
            return found
        source, futures = python_source.hoisted(found.source)
        if problems := tuple(wrong_python(source)):
            return replace(found, problems=problems)
        self._futures.update(dict.fromkeys(futures))
        source = python_source.with_global_annotations(source)
        if TAG in cell.tags:
            self.parameters, problems = parameters_of(source)
        return replace(found, source=source, problems=problems)

    def notes(self) -> list[tuple[int, Remark]]:
        """Notes for the user, with the numbers of the cells, in the order of the lines."""
        found = [(number, note) for number, cell in self.cells.items() for note in cell.notes]
        found += self._launchers_of_accelerate()
        return sorted(found, key=lambda item: (item[0], item[1].line))

    def _launchers_of_accelerate(self) -> Iterator[tuple[int, Remark]]:
        """Hugging Face's own `notebook_launcher`, which starts processes in each process of a launcher."""
        for number, item in self.cells.items():
            for node in ast.walk(item.tree) if _LAUNCHER in item.source else ():
                if not isinstance(node, ast.ImportFrom) or node.module not in {"accelerate", "accelerate.launchers"}:
                    continue
                if any(name.name == _LAUNCHER for name in node.names):
                    yield number, Remark(node.lineno, _RUN_BY_PYTHON)

    def problems(self) -> list[tuple[int, Remark]]:
        """Problems that prevent an export, with the numbers of the cells, in the order of the lines."""
        found = [(number, problem) for number, cell in self.cells.items() for problem in cell.problems]
        tagged = [cell.number for cell in self._all_cells if cell.number is not None and TAG in cell.tags]
        second = "is tagged `parameters` already; a script has its options from one cell."
        found += [(number, Remark(1, f"cell {tagged[0]} {second}")) for number in tagged[1:]]
        found += [*self._session_problems, *self._names_of_ipython()]
        return sorted(found, key=lambda item: (item[0], item[1].line))

    def _names_of_ipython(self) -> Iterator[tuple[int, Remark]]:
        """What only IPython knows, and no cell defines: its past results, and magics that read like Python."""
        sound = [(number, item, item.tree.body) for number, item in self.cells.items() if not item.problems]
        defined = {name for _, _, body in sound for name in python_source.ModuleNames(body).bound}
        # a file that %run runs may define anything
        is_open = "*" in defined or any('nb_shell.line("run"' in item.source for _, item, _ in sound)
        for number, item, body in sound:
            read = python_source.ModuleNames(body).read - defined
            lines: dict[str, int] = {}
            for node in body if any(map(_PAST_RESULT.fullmatch, read)) else ():
                past = {name for name in python_source.ModuleNames([node]).read & read if _PAST_RESULT.fullmatch(name)}
                for part in ast.walk(node):
                    if isinstance(part, ast.Name) and part.id in past:
                        lines.setdefault(part.id, part.lineno)
            for name, line in lines.items():
                text = f"`{name}` is what IPython keeps of other cells; give the value a name where it is computed."
                yield number, Remark(line, text)
            # a cell of `ls -la` is a difference to Python, and a magic to IPython while nothing is called `ls`
            source = item.source.strip()
            word = re.split(r"[^\w.]", source, maxsplit=1)[0]
            is_magic = word in MAGICS & read and "\n" not in source
            if is_magic and not is_open and not hasattr(builtins, word):
                line = item.source[: item.source.index(source)].count("\n") + 1
                yield number, Remark(line, f"nothing is called `{word}`, so it is a magic: write `%{source}`.")

    def text(self) -> str:
        """The whole text."""
        body = [line for cell in self._all_cells for line in self._lines(cell)]
        return "\n".join([*self._header(), *map(added, self._beginning()), *body]) + "\n"

    def _header(self) -> Iterator[str]:
        script = self._name.removesuffix(".ipynb") + ".py"
        plays = "rank 0 plays the notebook, and all ranks run their cells"
        ways = [
            (f"python {script}", "one process, or as many as the notebook starts"),
            (f"accelerate-nb launch -n 2 {script}", "every process runs all of it" if self.session is None else plays),
            (f"torchrun --nproc-per-node 2 {script}", "the same"),
        ]
        widest = max(len(command) for command, _ in ways)
        yield first_line(self._name, __version__)
        yield "#"
        yield from (f"#     {command:{widest}}    {meaning}" for command, meaning in ways)
        yield "#"
        yield '# Lines that end in "# +" are none of the notebook\'s.'

    def _beginning(self) -> Iterator[str]:
        """The lines above the first cell that are none of the notebook's."""
        cells = self.cells.values()
        if self._futures:
            yield f"from __future__ import {', '.join(self._futures)}"
        if any("get_ipython" in python_source.mentioned(cell.tree.body) for cell in cells):
            # gives None where there is no notebook, as the notebook's own does not
            yield "from IPython import get_ipython"
        yield "from accelerate_nb.script import shell as nb_shell"
        if any("display" in python_source.mentioned(cell.tree.body) for cell in cells):
            yield "from accelerate_nb.script.shell import display"
        if self.parameters:
            # a wrong option is an error before the script begins, and in the processes that import it for its data loaders
            headings = (_HEADING.search(cell.source) for cell in self._all_cells if cell.kind == "markdown")
            title = next((found[1] for found in headings if found), self._name)
            yield "nb_options = nb_shell.parameters("
            yield f"{python_source.INDENT}__name__, __file__, {title!r},"
            yield from (
                f"{python_source.INDENT}{item.name}=({item.type!r}, {item.default!r}, {item.help!r}),"
                for item in self.parameters
            )
            yield ")"
        yield python_source.GUARD
        yield f"{python_source.INDENT}nb_shell.start(__file__)"
        if self.session is not None:
            shared = [f"{name}={literal(value)}" for name, value in self.session.items() if name not in _OF_NOTEBOOKS]
            yield f"{python_source.INDENT}nb_shell.begin({', '.join(['__file__', *shared])})"

    def _lines(self, cell: NotebookCell) -> Iterator[str]:
        if cell.kind == "markdown" and cell.source.strip():
            yield from ("", marker(self._name, None), *_commented(cell.source))
        elif cell.number is not None:
            item = self.cells[cell.number]
            source = item.source
            yield from ("", marker(self._name, cell.number))
            if item.left_out:
                yield from _commented(source)
                return
            if (result := python_source.result_of(source, cell.source)) is not None:
                # `shown(a, b)` would be two arguments
                opening, closing = ("((", "))") if isinstance(result.value, ast.Tuple) else ("(", ")")
                source = python_source.edited(source, python_source.around(result, f"nb_shell.shown{opening}", closing))
            yield from python_source.guarded(source, cell.number, self._definitions, shown=result is not None)
            if self.parameters and TAG in cell.tags:
                # the names of the `parameters` cell get the values of the options
                names = ", ".join(parameter.name for parameter in self.parameters)
                comma = "," if len(self.parameters) == 1 else ""
                yield added(f"{names}{comma} = nb_options.instead_of({names})")


def _commented(text: str) -> Iterator[str]:
    return (f"# {line}".rstrip() for line in text.split("\n"))


def _session_of(cells: Mapping[int, PlainCell]) -> tuple[dict[str, Any] | None, tuple[tuple[int, Remark], ...]]:
    """The settings of the session that cells request, one after the other, and what a script's processes can't be."""
    settings: dict[str, Any] | None = None
    defaults = {setting.name: setting.default for setting in all_settings()}
    stopped: tuple[int, int] | None = None
    problems: list[tuple[int, Remark]] = []
    for number, line in ((number, line) for number, cell in cells.items() for line in cell.on_ranks):
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
            name
            for name, value in given.items()
            if known.get(name, defaults[name]) != value and name not in ADJUSTABLE_SETTINGS
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
