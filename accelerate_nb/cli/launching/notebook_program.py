"""A notebook as a program that `accelerate-nb launch` can run."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from accelerate_nb.cli.launching.find_program import path_of_workers
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.export.notebook import Notebook, read
from accelerate_nb.export.script import ExportedScript as Exported, as_script
from accelerate_nb.reports.text_format import aligned
from accelerate_nb.script.options import parameters
from accelerate_nb.worker.program import Program, ScriptFile


@dataclass(frozen=True, slots=True)
class NotebookProgram:
    """A notebook, and what it is as a script."""

    notebook: Notebook
    script: Exported

    @property
    def cells(self) -> int:
        """The number of its code cells."""
        return sum(cell.number is not None for cell in self.notebook.cells)

    def program(self, arguments: Sequence[str], folder: Path) -> Program:
        """The program, whose file is written into a folder that lasts as long as it runs."""
        # it works where the notebook lies, and imports what lies beside the notebook, as the notebook does
        path = self.notebook.path.absolute()
        file = folder / f"{path.stem}.py"
        file.write_text(self.script.text, encoding="utf-8")
        home = str(path.parent)
        what = ScriptFile(str(file), str(file), home)
        return replace(Program(what, tuple(arguments), path=path_of_workers()), folder=home, title=path.name)

    def check(self, arguments: Sequence[str]) -> None:
        """Read the notebook's parameters as every process will; what is wrong with them ends the command as it ends those."""
        name = self.notebook.path.name
        if not self.script.parameters:
            if arguments:
                raise ConfigurationError(f"{arguments[0]!r} was given, but {self.help()}")
            return
        options = {item.name: (item.type, item.default, item.help) for item in self.script.parameters}
        before = sys.argv[:]
        sys.argv[1:] = arguments
        try:
            parameters("__main__", name, name, **options)
        finally:
            sys.argv[:] = before

    def help(self) -> str:
        """The help text of the notebook's parameters."""
        name = self.notebook.path.name
        if not self.script.parameters:
            return f"{name} has no parameters: give the cell that sets them the tag `parameters`."
        heads = [f"--{item.name.replace('_', '-')} {item.type}" for item in self.script.parameters]
        tails = [f"{item.help} (default: {item.default})".strip() for item in self.script.parameters]
        lines = [f"  {line}" for line in aligned([*zip(heads, tails, strict=True)])]
        return "\n".join([f"parameters of {name}, after `--`:", *lines])


def notebook_program(path: str) -> NotebookProgram:
    """A notebook and its script; `ExportError` names every cell that can't be in one."""
    notebook = read(Path(path).expanduser())
    return NotebookProgram(notebook, as_script(notebook))
