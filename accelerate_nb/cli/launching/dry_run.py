"""`accelerate-nb launch --dry-run`: prints what a launch would do."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from accelerate_nb.cli.launching.request import PROG, LaunchRequest, check_ranks
from accelerate_nb.config.launch import LaunchingConfig
from accelerate_nb.config.run_config import grouped, origins
from accelerate_nb.config.settings import GROUPS
from accelerate_nb.errors import LaunchError
from accelerate_nb.launching.conductor import Nodes
from accelerate_nb.launching.launcher import choose_where, environment, worker_threads
from accelerate_nb.launching.nodes.rendezvous import RendezvousSettings
from accelerate_nb.launching.nodes.run_nodes import node_environment
from accelerate_nb.launching.planning.placement import Placement
from accelerate_nb.notebook.display.text import standard_sink
from accelerate_nb.notebook.display.text_output import LabelledLine
from accelerate_nb.reports.text_format import aligned, counted
from accelerate_nb.worker.program import Executable, Program, PythonModule

if TYPE_CHECKING:
    from accelerate_nb.cli.launching.find_program import NotebookProgram


# A heading, and rows of equally many cells below it.
Section: TypeAlias = tuple[str, Sequence[tuple[str, ...]]]


def print_plan(request: LaunchRequest, program: Program, notebook: NotebookProgram | None) -> int:
    """Print it; gives the exit code: 1 where it would not start."""
    problem = ""
    sections: list[Section] = [("What is run", _what(request, program, notebook)), *_settings(request)]
    if idle := [*request.theirs.without_effect(on_tpus=request.on_tpus).items()]:
        sections.append(("Flags that change nothing", idle))
    try:
        choice, nodes = choose_where(request.config)
        check_ranks(request, choice.size)
        what_starts = [("processes", str(choice.size)), ("device", choice.kind), ("why", choice.why)]
        sections.append(("What starts", what_starts))
        sections += (
            _workers(request, choice, program, notebook) if not nodes.roster.names else _nodes(request, choice, nodes)
        )
    except LaunchError as error:
        problem = str(error)
    sink = standard_sink()
    for title, rows in sections:
        lines = [LabelledLine("stdout", title, "title")]
        for row, line in zip(rows, aligned(rows), strict=True):
            lines.append(LabelledLine("stdout", f"  {line}", "bar" if row[-1] == "default" else ""))
        sink.write([*lines, LabelledLine("stdout", "")])
    if problem:
        print(f"{PROG}: {problem}", file=sys.stderr)
    return 1 if problem else 0


def torchrun(request: LaunchRequest, choice: Placement, program: Program, script: str | None = None) -> str:
    """The command line that starts the same processes with PyTorch's own launcher; `script` is another name of the program."""
    launching, what = request.config.launching, program.what
    restarts = ["--max-restarts", str(launching.max_restarts)] if launching.max_restarts else []
    how = {PythonModule: ["-m"], Executable: ["--no-python"]}.get(type(what), [])
    name = script or getattr(what, "given_path", None) or getattr(what, "path", None) or what.name
    processes = ["--nproc-per-node", str(choice.size)]
    words = ["torchrun", *_rendezvous(launching), *processes, *restarts, *how, name, *program.arguments]
    return shlex.join([*(f"{name}={value}" for name, value in variables(request, choice).items()), *words])


def _rendezvous(launching: LaunchingConfig) -> list[str]:
    """The words of torchrun for where processes find each other."""
    if not launching.is_on_each_node:
        return ["--master-port", str(launching.use_port)] if launching.use_port else ["--standalone"]
    settings = RendezvousSettings.of(launching)
    least = "" if settings.min_nodes is None else f"{settings.min_nodes}:"
    nodes = ["--nnodes", f"{least}{settings.nodes}"]
    if settings.node_rank is None:
        return [*nodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", settings.endpoint, "--rdzv-id", settings.run_id]
    master = ["--master-addr", settings.host, "--master-port", str(settings.port)]
    return [*nodes, "--node-rank", str(settings.node_rank), *master]


def variables(request: LaunchRequest, choice: Placement) -> dict[str, str]:
    """The environment variables of every worker that torchrun and Accelerate understand, too."""
    found = {
        **environment(request.config, choice, worker_threads(request.config.launching, choice)),
        **request.variables,
    }
    return {name: value for name, value in found.items() if not name.startswith("ACCELERATE_NB_")}


def _what(request: LaunchRequest, program: Program, notebook: NotebookProgram | None) -> list[tuple[str, ...]]:
    label = {PythonModule: "module", Executable: "program"}.get(type(program.what), "script")
    rows: list[tuple[str, ...]] = [(label, getattr(program.what, "path", None) or program.what.name)]
    if notebook is not None:
        parameters = ", ".join(f"{parameter.name} = {parameter.default}" for parameter in notebook.script.parameters)
        rows = [("notebook", str(notebook.notebook.path)), ("cells of code", str(notebook.cells))]
        rows += [("parameters", parameters or "none: no cell has the tag `parameters`")]
    if request.function is not None:
        rows.append(("function", request.function))
    if program.arguments:
        rows.append(("arguments", shlex.join(program.arguments)))
    return [*rows, ("works in", program.folder or os.getcwd())]


def _settings(request: LaunchRequest) -> Iterator[Section]:
    """Every setting below its heading: its value, and its source."""
    found = origins(request.settings, os.environ, request.content)
    sources = {"": "default", "the call": "the command line", "the configuration file": str(request.file)}
    for key, members in grouped().items():
        values = [(item.name, found[item.name]) for item in members]
        yield GROUPS[key], [(name, str(value.value), sources.get(value.source, value.source)) for name, value in values]


def _workers(
    request: LaunchRequest, choice: Placement, program: Program, notebook: NotebookProgram | None
) -> Iterator[Section]:
    yield "Environment of every process", sorted(variables(request, choice).items())
    script = None if notebook is None else notebook.notebook.path.with_suffix(".py").name
    lines = [] if notebook is None else [(shlex.join(["accelerate-nb", "export", str(notebook.notebook.path)]),)]
    yield "The same with torchrun", [*lines, (torchrun(request, choice, program, script),)]


def _nodes(request: LaunchRequest, choice: Placement, nodes: Nodes) -> Iterator[Section]:
    roster, inherits = nodes.roster, nodes.inherits_environment
    sizes = [(name, counted(size, "process")) for name, size in zip(roster.names, roster.sizes, strict=True)]
    spares = [(host.name, f"a spare for {counted(host.slots or 0, 'process')}") for host in roster.spares]
    yield "Nodes", [*sizes, *spares]
    found = node_environment(request.config, choice).environ if inherits else variables(request, choice)
    title = "Environment of every process" + (", beside that of its node" if inherits else "")
    yield title, sorted({**found, **request.variables}.items())
