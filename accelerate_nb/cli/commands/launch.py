"""`accelerate-nb launch`: a script, a module, a notebook or any program on every process."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate_nb.cli import hf_flags
from accelerate_nb.cli.exit_codes import INTERRUPTED, waited_for
from accelerate_nb.cli.launching import slurm_job
from accelerate_nb.cli.launching.request import PROG, SETTINGS, LaunchRequest, check_ranks, read_request
from accelerate_nb.cli.parser import add_config_file, add_settings, spellings
from accelerate_nb.config.environment import set_variables
from accelerate_nb.config.run_config import differing
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.reports.text_format import counted

if TYPE_CHECKING:
    from accelerate_nb.cli.launching.find_program import NotebookProgram
    from accelerate_nb.launching.conductor import Conductor
    from accelerate_nb.worker.program import Program

_USAGE = f"{PROG} [settings] (script.py | -m module | notebook.ipynb | --no_python program) [arguments]"
_EPILOG = """\
examples:
  accelerate-nb launch train.py --lr 3e-4              one process for each accelerator of this machine
  accelerate-nb launch -n 2 --cpu train.py             two connected processes on the CPU
  accelerate-nb launch -m package.train                a module, as in `python -m`
  accelerate-nb launch train.ipynb -n 4 -- --lr 3e-4   a notebook; its parameters follow `--`
  accelerate-nb launch train.ipynb --execute -n 4      the notebook itself, in a kernel; it keeps its outputs
  accelerate-nb launch --tpu train.py                  all chips of this machine's TPU, through torch_xla
  accelerate-nb launch --detach train.py               let it outlive this terminal: `accelerate-nb runs attach`
  accelerate-nb launch --slurm --nodes 2 train.py      a job of SLURM, which runs it on its nodes
  accelerate-nb launch --engine join --num-nodes 2 --join-address 10.0.0.1 train.py   machines that join by a line
  accelerate-nb launch --dry-run train.py              print what would happen, and start nothing

Flags may be written with hyphens or underscores. Every flag of Hugging Face's `accelerate launch` is known; `--dry-run` shows
which of them change nothing. What is not set here is taken from the environment, then from the configuration file.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.usage, parser.epilog = _USAGE, _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    group = parser.add_argument_group("Program and output")
    group.add_argument("-m", "--module", action="store_true", help="Run a module, as `python -m` does.")
    group.add_argument(
        *("--no-python", "--no_python"),
        action="store_true",
        help="Run any program; it finds its rank in its environment.",
    )
    add_config_file(group, "The configuration file; '' for none. Without it, the one that `accelerate config` writes.")
    group.add_argument(
        *("--dry-run", "--dry_run"), action="store_true", help="Print what would be started, and why; start nothing."
    )
    group.add_argument(
        "--execute",
        action="store_true",
        help="Execute a notebook as a notebook, and write it back with its outputs. Settings hold for its launches and its "
        "%%%%accelerate cells; a setting in the notebook wins: num_processes=4 in a cell over --num-processes.",
    )
    group.add_argument(
        *("-o", "--output"),
        metavar="NOTEBOOK",
        help="The file for the executed notebook, instead of the notebook itself.",
    )
    group.add_argument(
        *("--only-rank", "--only_rank"),
        metavar="R,...",
        help="Show the lines of these ranks only; all are kept in the run's folder.",
    )
    group.add_argument(
        *("-q", "--quiet"),
        action="store_true",
        help="Show the lines of ranks, and of a failure its cause; nothing else.",
    )
    group.add_argument("-t", "--tee", metavar="0-3", default="0", help=argparse.SUPPRESS)
    of_tpus = hf_flags.add_flags(parser)
    of_tpus.add_argument(*spellings("tpu_name"), metavar="NAME", help="The name of a TPU pod; as --tpu-cluster.")
    of_tpus.add_argument(*spellings("tpu_zone"), metavar="ZONE", help="The zone of Google's cloud it is in.")
    slurm_job.add_flags(parser)
    add_settings(parser, SETTINGS)
    parser.add_argument("what", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    # what stands after a notebook's name is read by the same parser
    parser.set_defaults(parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Do it; gives the exit code."""
    _take_seconds(arguments)
    given = arguments.what
    words = given[1:] if given[:1] == ["--"] else given
    if not words:
        raise ConfigurationError(f"No program was given. The usage is: {_USAGE}")
    target, *rest = words
    if target.lower().endswith(".ipynb") and not (arguments.module or arguments.no_python):
        return _run_notebook(target, rest, arguments)
    # as in Accelerate's parser: one `--`, before or after the program's name, ends the flags of the launch
    if words is given and rest[:1] == ["--"]:
        rest = rest[1:]
    _refuse_execution(arguments)
    request = read_request(arguments)
    if request.is_for_a_pod:
        return _print_for_a_pod([*(["-m"] if arguments.module else []), *given], request)
    if arguments.no_python and request.on_tpus:
        raise ConfigurationError(
            "--no_python was given for a launch through torch_xla, and the core of each worker is known only inside the "
            "Python of each worker. Run a script or a module of Python, or pass --cpu."
        )
    # not before the arguments are read: a help is to come at once
    from accelerate_nb.cli.launching import find_program

    program = find_program.program(
        target, rest, module=arguments.module, executable=arguments.no_python, function=request.function
    )
    if (job := slurm_job.requested_job(arguments)) is not None:
        how = ["-m"] if arguments.module else ["--no-python"] if arguments.no_python else []
        return slurm_job.launch_job(job, request, [*how, *given], is_dry=arguments.dry_run)
    return _run_program(program, request, arguments.dry_run)


def _run_notebook(target: str, rest: list[str], arguments: argparse.Namespace) -> int:
    import tempfile

    from accelerate_nb.cli.launching import find_program
    from accelerate_nb.config.environment import runs_folder
    from accelerate_nb.events.run_folder import new_folder

    # those for the launch, and, after `--`, those for the notebook
    at = rest.index("--") if "--" in rest else len(rest)
    flags, parameters = rest[:at], rest[at + 1 :]
    if not {"-h", "--help"}.isdisjoint(flags):
        print(f"{arguments.parser.format_help()}\n{find_program.notebook_program(target).help()}")
        return 0
    arguments.what = []
    try:
        if flags:
            arguments.parser.parse_args(flags, arguments)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error} Arguments for {target} itself go after `--`.") from None
    _take_seconds(arguments)
    if arguments.what:
        raise ConfigurationError(
            f"{arguments.what[0]!r} was given after {target}, where only flags of the launch are allowed. Arguments of the notebook go "
            f"after `--`: accelerate-nb launch {target} -- {' '.join(arguments.what)}"
        )
    if arguments.execute:
        return _execute(target, parameters, arguments)
    _refuse_execution(arguments)
    request = read_request(arguments)
    what = [target, *(["--", *parameters] if parameters else [])]
    if request.is_for_a_pod:
        return _print_for_a_pod(what, request)
    notebook = find_program.notebook_program(target)
    notebook.check(parameters)
    if (job := slurm_job.requested_job(arguments)) is not None:
        return slurm_job.launch_job(job, request, what, is_dry=arguments.dry_run)
    for note in notebook.script.notes:
        print(f"{PROG}: {note}", file=sys.stderr)
    launching = request.config.launching
    if launching.detach and not arguments.dry_run:
        # the run outlives this command, and so does the script
        folder = new_folder(runs_folder(os.environ, launching.folder), launching.name or notebook.notebook.path.name)
        return _run_program(notebook.program(parameters, folder), request, False, notebook, folder)
    with tempfile.TemporaryDirectory(prefix="accelerate_nb_") as temporary:
        program = notebook.program(parameters, Path(temporary))
        return _run_program(program, request, arguments.dry_run, notebook)


def _execute(target: str, parameters: list[str], arguments: argparse.Namespace) -> int:
    from accelerate_nb.cli.execute import execute

    if arguments.only_rank is not None:
        raise ConfigurationError("--only-rank chooses lines of a terminal, and --execute puts them into the notebook.")
    request = read_request(arguments)
    request.warn_of_unused_flags()
    output = None if arguments.output is None else Path(arguments.output)
    settings = execute.kernel_environment(
        request.settings, arguments.config_file, request.config.launching.panel, os.environ
    )
    execution = execute.request(target, output, parameters, {**request.variables, **settings}, quiet=request.quiet)
    return execute.print_plan(execution) if arguments.dry_run else execute.run(execution)


def _refuse_execution(arguments: argparse.Namespace) -> None:
    if arguments.execute:
        raise ConfigurationError("--execute was given, and only a notebook can be executed. Name one, or leave it out.")
    if arguments.output is not None:
        raise ConfigurationError(
            "--output was given, which names an executed notebook. Add --execute, or leave it out."
        )


def _print_for_a_pod(what: list[str], request: LaunchRequest) -> int:
    """Print the line that launches something on every machine of a pod, and explain it; gives the exit code."""
    from accelerate_nb.cli.commands import tpu_config

    request.warn_of_unused_flags()
    command = tpu_config.command_of_a_machine(request.tpus, differing(request.config), request.theirs.variables(), what)
    print(tpu_config.line_for_a_pod(request.tpus, command), flush=True)
    print(
        f"{PROG}: nothing was started here. The line above has every machine of the TPU {request.tpus.name} launch this on its own "
        "chips; copy it, or pipe it into sh. It needs gcloud, logged in to your project; on each machine it needs "
        "accelerate-nb and all that it runs, at the same path (`accelerate-nb tpu-config` prints lines that put them there).",
        file=sys.stderr,
    )
    return 0


def _run_program(
    program: Program,
    request: LaunchRequest,
    is_dry: bool,
    notebook: NotebookProgram | None = None,
    folder: Path | None = None,
) -> int:
    request.warn_of_unused_flags()
    if is_dry:
        from accelerate_nb.cli.launching import dry_run

        return dry_run.print_plan(request, program, notebook)
    if not request.config.launching.detach:
        return _conduct(program, request)
    from accelerate_nb.events.run_folder import shown_path
    from accelerate_nb.launching.detached.run_host import launch_detached

    # a run host conducts it, and this command returns at once
    with set_variables(request.variables, os.environ):
        conductor = launch_detached(program, (), request.config, folder)
    run, size = conductor.facts, len(conductor.view.ranks)
    check_ranks(request, size)
    name = shlex.quote(run.folder.name)
    print(f"{run.name} runs detached on {counted(size, 'rank')} ({run.why}).")
    print(f"  accelerate-nb runs attach {name}    its output, live; an interrupt leaves it alone")
    print(f"  accelerate-nb runs stop {name}      stop it after a step that all ranks share")
    print(f"  accelerate_nb.attach({run.folder.name!r})    the same in a notebook")
    print(f"All output: {shown_path(run.folder)}")
    return 0


def _take_seconds(arguments: argparse.Namespace) -> None:
    """`--quiet 30` is the former name of `--hang-warning-after 30`; no program's name is a number."""
    if arguments.quiet and arguments.what and re.fullmatch(r"\d+(\.\d*)?|\.\d+", arguments.what[0]):
        seconds, *words = arguments.what
        arguments.quiet, arguments.what = False, []
        arguments.parser.parse_args(["--hang-warning-after", seconds, *words], arguments)


def _conduct(program: Program, request: LaunchRequest) -> int:
    """Run a program in this process's hands until it is over; gives the exit code."""
    from accelerate_nb.launching.end_signals import exit_code_after
    from accelerate_nb.launching.run import Run
    from accelerate_nb.notebook.display.text import TextFrontEnd
    from accelerate_nb.worker.program import standard_input

    launching = request.config.launching
    is_off = launching.panel == "off"
    front_end = TextFrontEnd(
        prefix_template=launching.log_line_prefix_template,
        only_ranks=() if is_off else request.only_ranks,
        quiet=request.quiet or is_off,
        is_command=True,
    )
    # rank 0 reads this command's standard input where it is on this machine
    stdin = None if launching.names_hosts else standard_input()
    with set_variables(request.variables, os.environ), closing(stdin) if stdin else nullcontext():
        with _conducted(replace(program, stdin=stdin), request) as (conductor, signals):
            check_ranks(request, len(conductor.view.ranks))
            started = Run(conductor, front_end)
            try:
                code = waited_for(started, front_end, PROG)
            except KeyboardInterrupt:
                # one that came before the wait, which ends the workers at its own
                started.stop(timeout=0)
                code = INTERRUPTED
        ended = exit_code_after(signals, conductor.stopped_at)
        return code if ended is None else ended


@contextmanager
def _conducted(program: Program, request: LaunchRequest) -> Iterator[tuple[Conductor, list[int]]]:
    """The run's conductor, ready to be started, and the signals that have come; the run of a job is one to which others attach."""
    from accelerate_nb.launching import launcher
    from accelerate_nb.launching.end_signals import end_on_signals

    if os.environ.pop(slurm_job.IN_JOB, ""):
        from accelerate_nb.launching.detached.run_host import hosted

        with hosted(launcher.request(program, (), request.config)) as conducted:
            yield conducted
        return
    conductor = launcher.prepare(program, (), request.config)
    with end_on_signals(conductor) as signals:
        yield conductor, signals
