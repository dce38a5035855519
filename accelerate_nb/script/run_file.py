"""`%run` in a script: a file's program runs, and its definitions stay."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from accelerate_nb.errors import ScriptError

_NOTEBOOKS = {".ipynb"}


def run_file(
    path: str,
    arguments: Sequence[str],
    names: dict[str, Any],
    *,
    shares: bool = False,
    as_main: bool = True,
    exits: bool = True,
    is_module: bool = False,
) -> None:
    """
    Run a Python file, or a notebook, in this process, as `%run` does; its names are in `names` afterwards.

    With `shares` (`-i`) it sees the names that are there, as a notebook always does. Without `as_main` (`-n`) its `__name__`
    is not `"__main__"`, and without `exits` (`-e`) its `sys.exit` only ends itself. `is_module` (`-m`) takes the name of a
    module. Whatever it raises is raised here: IPython shows it and goes on.

    >>> run_file("prepare.py", ["--small"], globals())  # doctest: +SKIP
    """
    file = _module(path) if is_module else _file(path)
    is_notebook = file.suffix in _NOTEBOOKS
    name = "__main__" if as_main else file.stem
    module = ModuleType(name)
    if shares or is_notebook:
        vars(module).update(names)
    vars(module).update(__name__=name, __file__=str(file))
    with _program(module, [str(file), *arguments]):
        try:
            exec(compile(_source(file), str(file), "exec"), vars(module))
        except SystemExit as end:
            if end.code and exits:
                raise
        finally:
            names.update({key: value for key, value in vars(module).items() if not _is_dunder(key)})


def matching(pattern: str) -> list[str]:
    """
    The files that match a word of a command line; the word itself, if there are none.

    >>> matching("no such file *")
    ['no such file *']
    """
    expanded = os.path.expanduser(pattern)
    return sorted(glob.glob(expanded)) or [expanded]


def _file(path: str) -> Path:
    wanted = Path(path).expanduser()
    for file in (wanted, wanted.with_name(wanted.name + ".py")):
        if file.is_file():
            return file
    raise ScriptError(
        f"%run {path} was requested, but there is no such file in {Path.cwd()}. Run the script from its folder."
    )


def _module(name: str) -> Path:
    found = find_spec(name)
    if found is not None and found.submodule_search_locations:
        found = find_spec(f"{name}.__main__")
    if found is None or found.origin is None:
        raise ScriptError(
            f"%run -m {name} was requested, but there is no such module. Install it, or correct its name."
        )
    return Path(found.origin)


def _source(file: Path) -> str | bytes:
    if file.suffix not in _NOTEBOOKS:
        return file.read_bytes()
    from accelerate_nb.export.notebook import read
    from accelerate_nb.export.script import as_script

    return as_script(read(file)).text


@contextmanager
def _program(module: ModuleType, words: list[str]) -> Iterator[None]:
    """Until the end of the block `sys.argv` and the main module are a program's."""
    kept, replaced = sys.argv, sys.modules.get(module.__name__)
    sys.argv, sys.modules[module.__name__] = words, module
    try:
        yield
    finally:
        sys.argv = kept
        if replaced is not None:
            sys.modules[module.__name__] = replaced


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")
