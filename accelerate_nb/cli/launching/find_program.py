"""What `accelerate-nb launch` is to run: found, and looked at, before anything starts."""

from __future__ import annotations

import difflib
import os
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from traceback import format_exception_only

from accelerate_nb.errors import ConfigurationError, LaunchError
from accelerate_nb.launching.scripts import Executable, Function, Module, Program, Script, What, code_of

_PACKAGE = Path(__file__).parents[2]
NOTEBOOK = ".ipynb"


def is_notebook(said: str) -> bool:
    """Whether a path is a notebook's."""
    return said.lower().endswith(NOTEBOOK)


def program(
    said: str, arguments: Sequence[str], *, module: bool, executable: bool, function: str | None = None
) -> Program:
    """
    The script, module or executable that was said, with its arguments; of a script or a module that is imported, a function.

    `ConfigurationError` says what is not there, `LaunchError` where a script can't be read.
    """
    if module and executable:
        raise ConfigurationError("-m and --no_python were both given: one is for modules, the other for executables.")
    return Program(_what(said, module, executable, function), tuple(arguments), path=path_of_workers())


def _what(said: str, module: bool, executable: bool, function: str | None) -> What:
    if executable:
        return _executable(said)
    found = _module(said) if module else _script(said)
    return found if function is None else Function(found, function)


def path_of_workers() -> tuple[str, ...]:
    """`sys.path` as a program's Python has it behind its own entry: without the one that is this command's own."""
    own = {"", os.getcwd(), os.path.dirname(os.path.realpath(sys.argv[0]))}
    if getattr(sys.flags, "safe_path", False) or sys.path[0] not in own:
        return tuple(sys.path)
    # where it is run from a checkout, this package may be found nowhere else
    is_needed = Path(sys.path[0] or os.getcwd()).resolve() == _PACKAGE
    return (*sys.path[1:], *([str(_PACKAGE)] if is_needed and str(_PACKAGE) not in sys.path[1:] else []))


def _script(said: str) -> Script:
    path = os.path.abspath(os.path.expanduser(said))
    if not os.path.exists(path):
        raise ConfigurationError(f"{said} was to be run, and there is no such file. {_hint(said, path)}")
    if os.path.isfile(path) and path.endswith(".py"):
        _look_at(said, path)
    return Script(path, said)


def _look_at(said: str, path: str) -> None:
    """Find out now what every process would find out after its start."""
    try:
        code_of(path)
    except (SyntaxError, ValueError) as error:
        told = "".join(format_exception_only(type(error), error)).rstrip()
        raise LaunchError(f"{said} can't be run, because Python can't read it:\n{told}") from None
    except OSError as error:
        raise LaunchError(f"{said} can't be run: {error.strerror}. Let it be read by you.") from None


def _hint(said: str, path: str) -> str:
    folder = os.path.dirname(path)
    beside = os.listdir(folder) if os.path.isdir(folder) else []
    near = difflib.get_close_matches(os.path.basename(path), beside, n=1)
    if near:
        return f"Did you mean {os.path.join(os.path.dirname(said), near[0])}?"
    if shutil.which(said):
        return f"{said} is a program: run it with --no_python."
    if "/" not in said and _has_module(said):
        return f"There is a module of that name: run it with -m {said}."
    return "Correct its path."


def _module(said: str) -> Module:
    if not _has_module(said):
        if os.path.exists(said):
            raise ConfigurationError(f"-m {said} was to be run, and that is a path, not a module's name. Leave -m out.")
        raise ConfigurationError(
            f"-m {said} was to be run, and there is no module {said.partition('.')[0]} here. Correct its name, or install it."
        )
    return Module(said)


def _has_module(said: str) -> bool:
    """Whether the package, or the module, can be found; nothing is imported."""
    top = said.partition(".")[0]
    sys.path.insert(0, os.getcwd())
    try:
        return top.isidentifier() and find_spec(top) is not None
    except ValueError:
        # one that is loaded here and says nothing of where it came from
        return True
    finally:
        sys.path.pop(0)


def _executable(said: str) -> What:
    path = shutil.which(said)
    if path is None:
        raise ConfigurationError(
            f"--no_python {said} was to be run, and there is no such program, or it may not be run. Correct its name, or leave "
            "--no_python out where it is a script of Python."
        )
    return Executable(os.path.abspath(path))
