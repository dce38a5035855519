"""A notebook as the text of a script."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from accelerate_nb import __version__
from accelerate_nb.config.formats import literal
from accelerate_nb.errors import ExportError
from accelerate_nb.export.cell_translator import NotebookTranslation, TranslatedCell, translated
from accelerate_nb.export.magics import Remark
from accelerate_nb.export.main_guard import GUARD, INDENT, DefinitionFinder, guarded
from accelerate_nb.export.notebook import Notebook, NotebookCell
from accelerate_nb.export.parameters import Parameter
from accelerate_nb.export.python_source import bound, edited, mentioned, result_of, showing
from accelerate_nb.sources.cells import added, first_line, marker, table

# A run of the notebook leaves the values that it was given in a cell, as papermill does: a script is given its own.
_NOT_IN_SCRIPTS = frozenset({"remove-script", "skip-script", "injected-parameters"})
_HEADING = re.compile(r"^#{1,6} +(.+?)(?: +#+)? *$", re.MULTILINE)
# How a notebook shows a session; a terminal has ways of its own.
_OF_NOTEBOOKS = frozenset({"panel", "report"})


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
