"""`--execute`: a notebook runs in a kernel without a browser, and keeps its outputs."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate_nb.cli.exit_codes import BY_SIGNAL
from accelerate_nb.config import hf_files
from accelerate_nb.config.atomic_write import write_output
from accelerate_nb.config.formats import variables
from accelerate_nb.config.run_config import resolve
from accelerate_nb.errors import ConfigurationError, ExportError, MissingExtraError
from accelerate_nb.export.magics import plain
from accelerate_nb.export.notebook import Notebook, read
from accelerate_nb.export.parameters import TAG, parameters_of
from accelerate_nb.reports.text_format import counted
from accelerate_nb.script.options import read as read_options

NAME = "accelerate-nb"
_SUFFIX = ".ipynb"
_NEEDS = ("ipykernel", "nbclient", "nbformat")
# A live panel needs a browser and a kernel; a notebook that is read from its file has neither.
_PANEL = "html"


@dataclass(frozen=True, slots=True)
class ExecuteRequest:
    """A notebook to execute, with its parameters and its kernel's environment."""

    notebook: Notebook
    output: Path
    values: Mapping[str, Any] = field(default_factory=dict)  # of its parameters
    environment: Mapping[str, str] = field(default_factory=dict)  # beyond this process's own
    quiet: bool = False


def request(
    path: str | Path,
    output: Path | None = None,
    words: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    *,
    quiet: bool = False,
) -> ExecuteRequest:
    """A request, checked before the kernel starts: a wrong parameter, or output that can't be written, is an error now."""
    # Without an output, the notebook itself is written. `words` hold its parameters; `--help` among them ends the
    # command.
    notebook = read(Path(path).expanduser())
    target = notebook.path if output is None else output.expanduser()
    _check_output(target, notebook.path)
    if environment is None:
        file = hf_files.find(os.environ)
        config = resolve({}, os.environ, None if file is None else hf_files.read(file))
        environment = kernel_environment({}, None, config.launching.panel, os.environ)
    return ExecuteRequest(notebook, target, parameter_values(notebook, words), environment, quiet)


def parameter_values(notebook: Notebook, words: Sequence[str]) -> dict[str, Any]:
    """The values that words give a notebook's parameters, by their names; only the given ones."""
    if not words:
        return {}
    name = notebook.path.name
    options: dict[str, tuple[str, str, str]] = {}
    for cell in (cell for cell in notebook.cells if TAG in cell.tags):
        translated = plain(cell.source)
        try:
            found, wrong = parameters_of(translated.source)
        except SyntaxError as error:
            raise ExportError(f"{name}, cell {cell.number}, line {error.lineno or 1}: {error.msg}") from None
        if problems := (*translated.problems, *wrong):
            lines = [f"{name}, cell {cell.number}, line {problem.line}: {problem.text}" for problem in problems]
            raise ExportError("\n".join(["A cell tagged `parameters` holds what can't be one:", *lines]))
        options |= {item.name: (item.type, item.default, item.help) for item in found}
    if not options:
        raise ConfigurationError(
            f"{words[0]!r} was given, but {name} has no parameters: give the cell that sets them the tag `parameters`."
        )
    return dict(read_options(words, name, name, options).values)


def source_of(values: Mapping[str, Any]) -> str:
    """The cell that gives parameters these values."""
    lines = [f"{name} = {_literal(value)}" for name, value in values.items()]
    imports = ["from pathlib import Path", ""] if any("Path(" in line for line in lines) else []
    return "\n".join(["# Parameters", *imports, *lines])


def kernel_environment(
    settings: Mapping[str, Any], config_file: str | None, panel: str, environment: Mapping[str, str]
) -> dict[str, str]:
    """The variables of a kernel's environment for these settings, read by the launches of its notebook."""
    # `panel` is the one that holds so far; paths are this folder's, and the kernel works in another one
    folder = {"folder": os.path.abspath(os.path.expanduser(settings["folder"]))} if settings.get("folder") else {}
    found = variables({**settings, **folder, **({"panel": _PANEL} if panel == "auto" else {})})
    file = environment.get("ACCELERATE_NB_CONFIG_FILE") if config_file is None else config_file
    if file is not None:
        found["ACCELERATE_NB_CONFIG_FILE"] = file and os.path.abspath(os.path.expanduser(file))
    return found


def run(request: ExecuteRequest) -> int:
    """Do it, and write the notebook, however that went; gives the exit code."""
    if missing := [name for name in _NEEDS if find_spec(name) is None]:
        raise MissingExtraError(
            f"Executing a notebook needs {', '.join(missing)}, which is not installed here: "
            "pip install 'accelerate-nb[execute]'"
        )
    from accelerate_nb.cli.execute.kernel_client import CellProgress, executed, kernel_for
    from accelerate_nb.cli.execute.notebook_file import sheet, text_of

    name = request.notebook.path.name
    content, notes = sheet(request.notebook, source_of(request.values) if request.values else None)
    kernel = kernel_for(content)
    for note in (*notes, *kernel.notes):
        print(f"{NAME}: {name}: {note}", file=sys.stderr)
    try:
        end = executed(
            content,
            kernel,
            request.notebook.path.absolute().parent,
            {**os.environ, **request.environment},
            CellProgress(quiet=request.quiet),
        )
    finally:
        write_output(request.output, text_of(content))
    is_cut = end.failure is not None or bool(end.signals)
    if end.failure is not None and not end.signals:
        print(f"{NAME}: {name}, {end.failure.location()}: {end.failure.error}", file=sys.stderr)
    if is_cut or not request.quiet:
        how = "as far as it came" if is_cut else "with what it gave"
        print(f"{NAME}: {name} was written to {request.output}, {how}.", file=sys.stderr)
    return BY_SIGNAL + end.signals[0] if end.signals else int(is_cut)


def print_plan(request: ExecuteRequest) -> int:
    """Print what would be done; gives the exit code."""
    cells = sum(cell.number is not None for cell in request.notebook.cells)
    print(
        f"{request.notebook.path} would be executed: {counted(cells, 'code cell')}, in {request.notebook.path.absolute().parent}"
    )
    print(f"It would be written to {request.output}")
    if request.values:
        lines = source_of(request.values).splitlines()
        print(f"\nAfter its cell `{TAG}`:", *(f"  {line}".rstrip() for line in lines), sep="\n")
    if request.environment:
        lines = [f"{name}={value}" for name, value in sorted(request.environment.items())]
        print("\nVariables of its kernel's environment:", *(f"  {line}" for line in lines), sep="\n")
    return 0


def _check_output(output: Path, notebook: Path) -> None:
    """Stop before hours of work that could not be written."""
    action = f"{notebook} was to be executed and written to {output}"
    if output.suffix != _SUFFIX:
        raise ConfigurationError(f"{action}, which is no notebook's name. Let it end in {_SUFFIX}.")
    if output.is_dir():
        raise ConfigurationError(f"{action}, which is a folder. Name a file in it: -o {output / notebook.name}")
    folder = output.resolve().parent
    if not folder.is_dir():
        raise ConfigurationError(f"{action}, and there is no folder {folder}. Make it, or name a file in another one.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigurationError(f"{action}, and you may not write in {folder}. Name a file in another folder with -o.")


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
