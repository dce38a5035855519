"""`accelerate-nb export`: a notebook is written as a script."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from accelerate_nb.config.writing import write_whole
from accelerate_nb.errors import ConfigurationError, ExportError

# Python's own tests, which no program imports; many notebooks have this name.
_NEVER_IMPORTED = frozenset({"test"})


def configure(parser: argparse.ArgumentParser) -> None:
    """What to export, and where to."""
    parser.add_argument("notebook", type=Path, help="The notebook.")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="The script to write (default: beside the notebook, with .py).",
    )
    parser.add_argument("--stdout", action="store_true", help="Write the script to standard output.")
    parser.add_argument(
        "--keep-installs",
        action="store_true",
        help="Let the script install what the notebook does (%%pip install ...).",
    )
    parser.add_argument(
        "--execute",
        action="store_true",
        help="Write no script: execute the notebook, and write it with its outputs; `accelerate-nb launch` takes settings too.",
    )
    parser.add_argument("--force", action="store_true", help="Replace a file that was not exported from a notebook.")


def run(arguments: argparse.Namespace) -> int:
    """Write the script, then say on standard error what to know of it and how to run it."""
    from accelerate_nb.export.reading import read
    from accelerate_nb.export.script import Wishes, as_script

    notebook: Path = arguments.notebook
    if arguments.execute:
        return _execute(arguments)
    content = read(notebook)
    to_stdout = arguments.stdout or arguments.output == Path("-")
    output = None if to_stdout else arguments.output or notebook.with_suffix(".py")
    if output is not None:
        _refuse(output, notebook, force=arguments.force)
    script = as_script(content, Wishes(keep_installs=arguments.keep_installs))
    if output is not None and not arguments.force:
        _refuse_to_hide_a_module(output, notebook, script.text)
    if output is None:
        sys.stdout.write(script.text)
    else:
        write(output, script.text)
    for note in script.notes:
        print(note, file=sys.stderr)
    if output is not None:
        told = shlex.quote(str(output))
        print(f"{notebook} was exported. Run it: python {told}, or accelerate-nb launch {told}", file=sys.stderr)
    return 0


def _execute(arguments: argparse.Namespace) -> int:
    from accelerate_nb.cli import execute

    if arguments.stdout or arguments.output == Path("-"):
        raise ConfigurationError("--execute writes a notebook, and --stdout is for scripts. Name a file with -o.")
    return execute.run(execute.wish(arguments.notebook, arguments.output))


def _refuse(output: Path, notebook: Path, *, force: bool) -> None:
    """Stop before a file is lost."""
    from accelerate_nb.export.places import notebook_of

    asked = f"{notebook} was to be exported to {output}"
    if output.is_dir():
        raise ExportError(
            f"{asked}, which is a folder. Name a file in it: -o {output / notebook.with_suffix('.py').name}"
        )
    if output.exists() and output.samefile(notebook):
        raise ExportError(f"{asked}, which is the notebook itself. Name another file.")
    if not output.exists() or force:
        return
    try:
        with output.open(encoding="utf-8", errors="replace") as file:
            first = file.readline()
    except OSError as error:
        raise ExportError(f"{asked}, which can't be read: {error.strerror}. Name another file.") from None
    if notebook_of(first) is None:
        raise ExportError(
            f"{asked}, which holds something else. Say --force to replace it, or -o to name another file."
        )


def _refuse_to_hide_a_module(output: Path, notebook: Path, text: str) -> None:
    """A script called `random.py` would be imported by itself, and by the notebook beside it, in the place of `random`."""
    name = output.stem
    if name in _imported(text) | (sys.stdlib_module_names - _NEVER_IMPORTED):
        raise ExportError(
            f"{notebook} was to be exported to {output}, and `import {name}` would find that in the place of {name} itself, "
            f"in the notebook too. Name another file: -o {shlex.quote(str(output.with_name(f'{name}_script.py')))}"
        )


def _imported(text: str) -> set[str]:
    """The modules at the top of what a script imports."""
    import ast

    nodes = list(ast.walk(ast.parse(text)))
    names = [each.name for one in nodes if isinstance(one, ast.Import) for each in one.names]
    names += [one.module or "" for one in nodes if isinstance(one, ast.ImportFrom) and not one.level]
    return {name.partition(".")[0] for name in names}


def write(output: Path, text: str) -> None:
    """Write a file whole, or leave what is there."""
    try:
        write_whole(output, text)
    except OSError as error:
        raise ExportError(
            f"{output} was to be written, but it can't be: {error.strerror}. Name another file."
        ) from None
