"""The program of `accelerate-nb launch`, which may be a notebook: found and checked before anything starts."""

import difflib
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from traceback import format_exception_only

from accelerate_nb.errors import ConfigurationError, LaunchError
from accelerate_nb.export.notebook import Notebook, read
from accelerate_nb.export.script import ExportedScript as Exported, as_script
from accelerate_nb.reports.text_format import aligned
from accelerate_nb.script.options import parameters
from accelerate_nb.worker.program import (
    Executable,
    Program,
    PythonModule,
    Runnable,
    ScriptFile,
    ScriptFunction,
    code_of,
)

_PACKAGE = Path(__file__).parents[2]


def program(
    name: str, arguments: Sequence[str], *, module: bool, executable: bool, function: str | None = None
) -> Program:
    """The named script, module or executable, with its arguments; of a script or a module that is imported, a function."""
    if module and executable:
        raise ConfigurationError("-m and --no_python were both given: one is for modules, the other for executables.")
    if executable:
        if (path := shutil.which(name)) is None:
            raise ConfigurationError(
                f"--no_python {name} was to be run, and there is no such program, or it may not be run. Correct its name, or leave "
                "--no_python out where it is a script of Python."
            )
        what: Runnable = Executable(os.path.abspath(path))
    else:
        found = _module(name) if module else _script(name)
        what = found if function is None else ScriptFunction(found, function)
    return Program(what, tuple(arguments), path=path_of_workers())


def path_of_workers() -> tuple[str, ...]:
    """`sys.path` as a program's Python has it after its own entry: without this command's own entry."""
    added = {"", os.getcwd(), os.path.dirname(os.path.realpath(sys.argv[0]))}
    if getattr(sys.flags, "safe_path", False) or sys.path[0] not in added:
        return tuple(sys.path)
    # where it is run from a checkout, this package may be found nowhere else
    is_needed = Path(sys.path[0] or os.getcwd()).resolve() == _PACKAGE
    return (*sys.path[1:], *([str(_PACKAGE)] if is_needed and str(_PACKAGE) not in sys.path[1:] else []))


def _script(name: str) -> ScriptFile:
    path = os.path.abspath(os.path.expanduser(name))
    is_special = os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path))
    if name == "-" or is_special or path.startswith(("/dev/stdin", "/dev/fd/")):
        # in a worker it is empty, or another one
        raise ConfigurationError(
            f"{name} was to be run, which is no file that every process can read. Save the script in a file, and name that."
        )
    if not os.path.exists(path):
        raise ConfigurationError(f"{name} was to be run, and there is no such file. {_suggestion(name, path)}")
    if os.path.isdir(path) and not any(Path(path).glob("__main__.py*")):
        raise ConfigurationError(f"{name} was to be run, and is a folder without a __main__.py. Name a script in it.")
    if os.path.isfile(path) and path.endswith(".py"):
        # every process would find it out after its start
        try:
            code_of(path)
        except (SyntaxError, ValueError) as error:
            message = "".join(format_exception_only(type(error), error)).rstrip()
            raise LaunchError(f"{name} can't be run, because Python can't read it:\n{message}") from None
        except OSError as error:
            raise LaunchError(
                f"{name} can't be run: {error.strerror}. Give yourself the permission to read it."
            ) from None
    return ScriptFile(path, name)


def _suggestion(name: str, path: str) -> str:
    folder = os.path.dirname(path)
    beside = os.listdir(folder) if os.path.isdir(folder) else []
    if near := difflib.get_close_matches(os.path.basename(path), beside, n=1):
        return f"Did you mean {os.path.join(os.path.dirname(name), near[0])}?"
    if shutil.which(name):
        return f"{name} is a program: run it with --no_python."
    if "/" not in name and _has_module(name):
        return f"There is a module of that name: run it with -m {name}."
    return "Correct its path."


def _module(name: str) -> PythonModule:
    is_script = name.endswith(".py") and os.path.isfile(name)
    if is_script or not _has_module(name):
        if os.path.exists(name):
            raise ConfigurationError(f"-m {name} was to be run, and that is a path, not a module's name. Leave -m out.")
        raise ConfigurationError(
            f"-m {name} was to be run, and there is no module {name.partition('.')[0]} here. Correct its name, or install it."
        )
    return PythonModule(name)


def _has_module(name: str) -> bool:
    """Whether the package, or the module, can be found; nothing is imported."""
    top = name.partition(".")[0]
    sys.path.insert(0, os.getcwd())
    try:
        return top.isidentifier() and find_spec(top) is not None
    except ValueError:
        # one that is loaded here without a spec
        return True
    finally:
        sys.path.pop(0)


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
