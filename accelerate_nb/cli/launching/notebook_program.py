"""A notebook as a program that `accelerate-nb launch` can run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from accelerate_nb.cli.programs import path_of_workers
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.export.parameters import Parameter
from accelerate_nb.export.reading import Notebook, read
from accelerate_nb.export.script import Script as Exported, as_script
from accelerate_nb.launching.scripts import Program, Script
from accelerate_nb.script.parameters import parameters


@dataclass(frozen=True, slots=True)
class Readable:
    """A notebook, and what it is as a script."""

    notebook: Notebook
    script: Exported

    @property
    def cells(self) -> int:
        """How many cells of code it has."""
        return sum(cell.number is not None for cell in self.notebook.cells)

    def program(self, arguments: Sequence[str], folder: Path) -> Program:
        """
        The program, whose file is written into a folder that lasts as long as it runs.

        It works where the notebook lies, and imports what lies beside the notebook, as the notebook does.
        """
        path = self.notebook.path.absolute()
        file = folder / f"{path.stem}.py"
        file.write_text(self.script.text, encoding="utf-8")
        home = str(path.parent)
        what = Script(str(file), str(file), home)
        return replace(Program(what, tuple(arguments), path=path_of_workers()), folder=home, title=path.name)

    def check(self, arguments: Sequence[str]) -> None:
        """Read the notebook's parameters as every process will; what is wrong with them ends the command as it ends those."""
        name = self.notebook.path.name
        if not self.script.parameters:
            if arguments:
                raise ConfigurationError(f"{arguments[0]!r} was given, but {self.help()}")
            return
        options = {one.name: (one.type, one.default, one.help) for one in self.script.parameters}
        before = sys.argv[:]
        sys.argv[1:] = arguments
        try:
            parameters("__main__", name, name, **options)
        finally:
            sys.argv[:] = before

    def help(self) -> str:
        """What a help says of the notebook's parameters."""
        name = self.notebook.path.name
        if not self.script.parameters:
            return f"{name} has no parameters: give the cell that sets them the tag `parameters`."
        width = max(len(_head(one)) for one in self.script.parameters) + 2
        lines = [f"  {_head(one):<{width}}{_tail(one)}".rstrip() for one in self.script.parameters]
        return "\n".join([f"parameters of {name}, behind `--`:", *lines])


def readable(said: str) -> Readable:
    """A notebook and its script; `ExportError` names every cell that can't be in one."""
    notebook = read(Path(said).expanduser())
    return Readable(notebook, as_script(notebook))


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Words behind a notebook: those for the launch, and, behind `--`, those for the notebook."""
    said = list(words)
    at = said.index("--") if "--" in said else len(said)
    return said[:at], said[at + 1 :]


def refuse_words(notebook: str, words: Sequence[str]) -> None:
    """Nothing but flags of the launch stands behind a notebook."""
    if words:
        raise ConfigurationError(
            f"{words[0]!r} stands behind {notebook}, where only flags of the launch do. What is for the notebook goes behind "
            f"`--`: accelerate-nb launch {notebook} -- {' '.join(words)}"
        )


def _head(one: Parameter) -> str:
    return f"--{one.name.replace('_', '-')} {one.type}"


def _tail(one: Parameter) -> str:
    return f"{one.help} (default: {one.default})".strip()
