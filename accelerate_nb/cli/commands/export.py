"""`accelerate-nb export`: a notebook is written as a script."""

import argparse
import shlex
import sys
from pathlib import Path

from accelerate_nb.config.atomic_write import write_output
from accelerate_nb.errors import ConfigurationError, ExportError

# Python's own tests, which no program imports; many notebooks have this name.
_NEVER_IMPORTED = frozenset({"test"})


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("notebook", type=Path, help="The notebook.")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="The script to write (default: next to the notebook, with .py).",
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
    """Write the script, then print notes on it and how to run it to standard error."""
    from accelerate_nb.export.notebook import read
    from accelerate_nb.export.script import as_script

    notebook: Path = arguments.notebook
    to_stdout = arguments.stdout or arguments.output == Path("-")
    if arguments.execute:
        from accelerate_nb.cli.execute import execute

        if to_stdout:
            raise ConfigurationError("--execute writes a notebook, and --stdout is for scripts. Name a file with -o.")
        return execute.run(execute.request(notebook, arguments.output))
    if arguments.stdout and arguments.output not in (None, Path("-")):
        raise ConfigurationError(
            f"--stdout and -o {shlex.quote(str(arguments.output))} were both given, and a script goes to one of them. Leave one out."
        )
    content = read(notebook)
    output = None if to_stdout else arguments.output or notebook.with_suffix(".py")
    if output is not None:
        _refuse(output, notebook, force=arguments.force)
    script = as_script(content, keep_installs=arguments.keep_installs)
    hidden = _imported(script.text) | (sys.stdlib_module_names - _NEVER_IMPORTED)
    if output is not None and output.stem in hidden and not arguments.force:
        # `random.py`: it, and the notebook next to it, would import it instead of `random`
        raise ExportError(
            f"{notebook} was to be exported to {output}, and `import {output.stem}` would find that instead of {output.stem} itself, "
            f"in the notebook too. Name another file: -o {shlex.quote(str(output.with_name(f'{output.stem}_script.py')))}"
        )
    if output is None:
        sys.stdout.write(script.text)
    else:
        write_output(output, script.text)
    for note in script.notes:
        print(note, file=sys.stderr)
    if output is not None:
        command_path = shlex.quote(str(output))
        print(
            f"{notebook} was exported. Run it: python {command_path}, or accelerate-nb launch {command_path}",
            file=sys.stderr,
        )
    return 0


def _refuse(output: Path, notebook: Path, *, force: bool) -> None:
    """Stop before a file is lost."""
    from accelerate_nb.sources.cells import notebook_of

    request = f"{notebook} was to be exported to {output}"
    if output.is_dir():
        raise ConfigurationError(
            f"{request}, which is a folder. Name a file in it: -o {output / notebook.with_suffix('.py').name}"
        )
    if output.exists() and output.samefile(notebook):
        raise ConfigurationError(f"{request}, which is the notebook itself. Name another file.")
    if not output.exists() or force:
        return
    try:
        with output.open(encoding="utf-8", errors="replace") as file:
            first = file.readline()
    except OSError as error:
        raise ExportError(f"{request}, which can't be read: {error.strerror}. Name another file.") from None
    if notebook_of(first) is None:
        raise ExportError(
            f"{request}, which holds something else. Pass --force to replace it, or -o to name another file."
        )


def _imported(text: str) -> set[str]:
    """The modules at the top of what a script imports."""
    import ast

    nodes = list(ast.walk(ast.parse(text)))
    names = [item.name for node in nodes if isinstance(node, ast.Import) for item in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in names}
