"""What `accelerate-nb launch` would do, told before it does it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accelerate_nb.cli.launch import PROG, Asked, check_ranks
from accelerate_nb.config.fields import GROUPS
from accelerate_nb.config.run import grouped, origins
from accelerate_nb.devices.probe import probe
from accelerate_nb.errors import LaunchError
from accelerate_nb.launching.choosing import Choice, choose
from accelerate_nb.launching.functions import environment
from accelerate_nb.launching.scripts import Executable, Module, Program
from accelerate_nb.reports.wording import aligned

if TYPE_CHECKING:
    from accelerate_nb.cli.notebooks import Readable


@dataclass(frozen=True, slots=True)
class Part:
    """A heading, and rows of equally many cells below it."""

    title: str
    rows: tuple[tuple[str, ...], ...]


def tell(asked: Asked, program: Program, notebook: Readable | None) -> int:
    """Print it; gives the exit code: 1 where it would not start."""
    problem = ""
    parts = [*_what(asked, program, notebook), *_settings(asked), *_flags(asked)]
    try:
        choice = choose(
            asked.config.launching, probe(), can_fork=hasattr(os, "fork"), mesh=asked.config.training.xla_mesh
        )
        check_ranks(asked, choice.size)
        parts += _workers(asked, choice, program, notebook)
    except LaunchError as error:
        problem = str(error)
    _show(parts)
    if problem:
        print(f"{PROG}: {problem}", file=sys.stderr)
    return 1 if problem else 0


def torchrun(asked: Asked, choice: Choice, program: Program, script: str | None = None) -> str:
    """The command line that starts the same processes with PyTorch's own launcher; `script` is another name of the program."""
    wish = asked.config.launching
    meeting = ["--master-port", str(wish.use_port)] if wish.use_port else ["--standalone"]
    restarts = ["--max-restarts", str(wish.max_restarts)] if wish.max_restarts else []
    words = ["torchrun", *meeting, "--nproc-per-node", str(choice.size), *restarts, *_named(program, script)]
    return shlex.join([*(f"{name}={value}" for name, value in variables(asked, choice).items()), *words])


def variables(asked: Asked, choice: Choice) -> dict[str, str]:
    """What the environment of every worker says of this launch, in words that others understand, too."""
    said = {**environment(asked.config, choice), **asked.variables}
    return {name: value for name, value in said.items() if not name.startswith("ACCELERATE_NB_")}


def _named(program: Program, script: str | None) -> list[str]:
    kinds = {Module: ["-m"], Executable: ["--no-python"]}
    said = script or getattr(program.what, "said", None) or getattr(program.what, "path", None) or program.what.name
    return [*kinds.get(type(program.what), []), said, *program.arguments]


def _what(asked: Asked, program: Program, notebook: Readable | None) -> Iterator[Part]:
    kind = {Module: "module", Executable: "program"}.get(type(program.what), "script")
    rows = [(kind, program.what.name)]
    if notebook is not None:
        parameters = ", ".join(f"{one.name} = {one.default}" for one in notebook.script.parameters)
        rows = [("notebook", str(notebook.notebook.path)), ("cells of code", str(notebook.cells))]
        rows += [("parameters", parameters or "none: no cell has the tag `parameters`")]
    elif (path := getattr(program.what, "path", None)) is not None:
        rows = [(kind, path)]
    if asked.function is not None:
        rows.append(("function", asked.function))
    if program.arguments:
        rows.append(("arguments", shlex.join(program.arguments)))
    rows.append(("works in", program.folder or os.getcwd()))
    yield Part("What is run", tuple(rows))


def _settings(asked: Asked) -> Iterator[Part]:
    """Every setting below its heading: its value, and where that was said."""
    found = origins(asked.said, os.environ, asked.content)
    for key, own in grouped().items():
        values = ((one.name, found[one.name]) for one in own)
        yield Part(GROUPS[key], tuple((name, str(value.value), _place(value.place, asked)) for name, value in values))


def _place(place: str, asked: Asked) -> str:
    told = {"": "default", "the call": "the command line", "the configuration file": str(asked.file)}
    return told.get(place, place)


def _flags(asked: Asked) -> Iterator[Part]:
    if rows := tuple(asked.theirs.without_effect(on_tpus=asked.on_tpus).items()):
        yield Part("Flags that change nothing", rows)


def _workers(asked: Asked, choice: Choice, program: Program, notebook: Readable | None) -> Iterator[Part]:
    rows = (("processes", str(choice.size)), ("device", choice.kind), ("why", choice.why))
    yield Part("What starts", rows)
    yield Part("What every process's environment says", tuple(sorted(variables(asked, choice).items())))
    if choice.per_process == 1:
        # torchrun knows no ranks that are threads of one process
        yield Part("The same with torchrun", tuple((line,) for line in _lines(asked, choice, program, notebook)))


def _lines(asked: Asked, choice: Choice, program: Program, notebook: Readable | None) -> Iterator[str]:
    if notebook is None:
        yield torchrun(asked, choice, program)
        return
    script = notebook.notebook.path.with_suffix(".py").name
    yield shlex.join(["accelerate-nb", "export", str(notebook.notebook.path)])
    yield torchrun(asked, choice, program, script)


def _show(parts: list[Part]) -> None:
    if sys.stdout.isatty():
        _show_in_colour(parts)
        return
    for part in parts:
        print(part.title)
        for line in aligned(part.rows):
            print(f"  {line}")
        print()


def _show_in_colour(parts: list[Part]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for part in parts:
        console.print(Text(part.title, style="bold"))
        if len(part.rows[0]) == 1:
            # a line to be copied: nothing stands around it
            console.print(Text("\n".join(row[0] for row in part.rows)), soft_wrap=True)
        else:
            table = Table.grid(padding=(0, 2))
            for row in part.rows:
                is_default = row[-1] == "default"
                table.add_row(*(Text(f"  {row[0]}"), *map(Text, row[1:])), style="dim" if is_default else None)
            console.print(table)
        console.print()
