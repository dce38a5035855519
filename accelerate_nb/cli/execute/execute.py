"""`--execute`: a notebook runs in a kernel without a page, and keeps what its cells gave."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate_nb.cli.codes import BY_SIGNAL
from accelerate_nb.cli.export import write
from accelerate_nb.config import files
from accelerate_nb.config.run import resolve
from accelerate_nb.config.spelling import variables
from accelerate_nb.errors import ConfigurationError, ExportError, MissingExtraError
from accelerate_nb.export.magics import plain
from accelerate_nb.export.parameters import TAG, parameters_of
from accelerate_nb.export.reading import Cell, Notebook, read
from accelerate_nb.script.parameters import read as read_options

if TYPE_CHECKING:
    from accelerate_nb.cli.kernels import End

NAME = "accelerate-nb"
_SUFFIX = ".ipynb"
_NEEDS = ("ipykernel", "nbclient", "nbformat")
# A panel that moves needs a page and a kernel; what is read from a file has neither.
_PANEL = "html"


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be executed, and what it is told."""

    notebook: Notebook
    output: Path
    values: Mapping[str, Any] = field(default_factory=dict)  # of its parameters
    environment: Mapping[str, str] = field(default_factory=dict)  # beyond this process's own
    quiet: bool = False


def wish(
    said: str | Path,
    output: Path | None = None,
    words: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    *,
    quiet: bool = False,
) -> Wish:
    """
    A notebook, looked at before its kernel starts: what it can't be told, or written to, is an error now.

    Without an output, the notebook itself is written. `words` say its parameters, as for its script; `--help` among them
    ends the command.
    """
    notebook = read(Path(said).expanduser())
    place = notebook.path if output is None else output.expanduser()
    _check_place(place, notebook.path)
    told_kernel = by_itself(os.environ) if environment is None else environment
    return Wish(notebook, place, said_of(notebook, words), told_kernel, quiet)


def said_of(notebook: Notebook, words: Sequence[str]) -> dict[str, Any]:
    """The values that words give a notebook's parameters, by their names; only those that were said."""
    if not words:
        return {}
    name = notebook.path.name
    options = dict(option for cell in notebook.cells if TAG in cell.tags for option in _options(name, cell))
    if not options:
        raise ConfigurationError(
            f"{words[0]!r} was given, but {name} has no parameters: give the cell that sets them the tag `parameters`."
        )
    said = read_options(words, name, name, options)
    return {one.name: one.type.whole(said.values[one.name]) for one in said.options if one.name in said.values}


def source_of(values: Mapping[str, Any]) -> str:
    """
    The cell that gives parameters these values.

    >>> print(source_of({"lr": 0.1, "data": Path("mnist")}))
    # Parameters
    from pathlib import Path
    <BLANKLINE>
    lr = 0.1
    data = Path('mnist')
    """
    lines = [f"{name} = {_literal(value)}" for name, value in values.items()]
    imports = ["from pathlib import Path", ""] if any("Path(" in line for line in lines) else []
    return "\n".join(["# Parameters", *imports, *lines])


def told(said: Mapping[str, Any], config_file: str | None, panel: str, own: Mapping[str, str]) -> dict[str, str]:
    """
    What a kernel's environment says of these settings, for the launches of its notebook.

    `panel` is the one that holds so far, and `own` this process's environment. Paths are this folder's, and the kernel
    works in another one.
    """
    folder = {"folder": os.path.abspath(os.path.expanduser(said["folder"]))} if said.get("folder") else {}
    found = variables({**said, **folder, **({"panel": _PANEL} if panel == "auto" else {})})
    file = own.get("ACCELERATE_NB_CONFIG_FILE") if config_file is None else config_file
    if file is not None:
        found["ACCELERATE_NB_CONFIG_FILE"] = file and os.path.abspath(os.path.expanduser(file))
    return found


def by_itself(own: Mapping[str, str]) -> dict[str, str]:
    """What a kernel's environment says where nothing was said on the command line."""
    file = files.find(own)
    config = resolve({}, own, None if file is None else files.read(file))
    return told({}, None, config.launching.panel, own)


def run(asked: Wish) -> int:
    """Do it, and write the notebook, however that went; gives the exit code."""
    if missing := [name for name in _NEEDS if find_spec(name) is None]:
        raise MissingExtraError(
            f"Executing a notebook needs {', '.join(missing)}, which is not installed here: "
            "pip install 'accelerate-nb[execute]'"
        )
    from accelerate_nb.cli.kernels import executed, kernel_for
    from accelerate_nb.cli.progress import Progress
    from accelerate_nb.cli.sheets import sheet

    name = asked.notebook.path.name
    made = sheet(asked.notebook, source_of(asked.values) if asked.values else None)
    kernel = kernel_for(made.content)
    made.run_by(kernel)
    for note in (*made.notes, *kernel.notes):
        print(f"{NAME}: {name}: {note}", file=sys.stderr)
    try:
        end = executed(
            made.content,
            kernel,
            asked.notebook.path.absolute().parent,
            {**os.environ, **asked.environment},
            Progress(quiet=asked.quiet),
        )
    finally:
        write(asked.output, made.text())
    return _told(asked, end)


def tell(asked: Wish) -> int:
    """Say what would be done; gives the exit code."""
    cells = sum(cell.number is not None for cell in asked.notebook.cells)
    print(f"{asked.notebook.path} would be executed: {cells} cells of code, in {asked.notebook.path.absolute().parent}")
    print(f"It would be written to {asked.output}")
    if asked.values:
        print(f"\nBehind its cell `{TAG}`:\n{_indented(source_of(asked.values))}")
    if asked.environment:
        said = "\n".join(f"{name}={value}" for name, value in sorted(asked.environment.items()))
        print(f"\nIts kernel's environment says:\n{_indented(said)}")
    return 0


def _check_place(place: Path, notebook: Path) -> None:
    """Stop before hours of work that could not be written."""
    asked = f"{notebook} was to be executed and written to {place}"
    if place.suffix != _SUFFIX:
        raise ConfigurationError(f"{asked}, which is no notebook's name. Let it end in {_SUFFIX}.")
    if place.is_dir():
        raise ConfigurationError(f"{asked}, which is a folder. Name a file in it: -o {place / notebook.name}")
    folder = place.resolve().parent
    if not folder.is_dir():
        raise ConfigurationError(f"{asked}, and there is no folder {folder}. Make it, or name a file in another one.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigurationError(f"{asked}, and you may not write in {folder}. Name a file in another folder with -o.")


def _options(name: str, cell: Cell) -> list[tuple[str, tuple[str, str, str]]]:
    """The options that a tagged cell is, as for a script; `ExportError` where it holds something else."""
    translated = plain(cell.source)
    try:
        found = parameters_of(translated.source)
    except SyntaxError as error:
        raise ExportError(f"{name}, cell {cell.number}, line {error.lineno or 1}: {error.msg}") from None
    if problems := (*translated.problems, *found.problems):
        lines = [f"{name}, cell {cell.number}, line {one.line}: {one.text}" for one in problems]
        raise ExportError("\n".join(["A cell tagged `parameters` holds what can't be one:", *lines]))
    return [(one.name, (one.type, one.default, one.help)) for one in found.found]


def _literal(value: Any) -> str:
    if isinstance(value, Path):
        return f"Path({str(value)!r})"
    if isinstance(value, float) and repr(value) in ("inf", "-inf", "nan"):
        return f"float({repr(value)!r})"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(_literal, value))}{',' if len(value) == 1 else ''})"
    return repr(value)


def _indented(text: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in text.splitlines())


def _told(asked: Wish, end: End) -> int:
    name = asked.notebook.path.name
    if end.failure is not None and not end.signals:
        print(f"{NAME}: {name}, {end.failure.place()}: {end.failure.error}", file=sys.stderr)
    if end.failure is not None or end.signals or not asked.quiet:
        how = "as far as it came" if end.failure is not None or end.signals else "with what it gave"
        print(f"{NAME}: {name} was written to {asked.output}, {how}.", file=sys.stderr)
    if end.signals:
        return BY_SIGNAL + end.signals[0]
    return 1 if end.failure is not None else 0
