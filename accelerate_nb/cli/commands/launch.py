"""`accelerate-nb launch`: a script, a module, a notebook or any program on every process."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate_nb.cli import programs, theirs
from accelerate_nb.cli.codes import BROKEN_PIPE, BY_SIGNAL, INTERRUPTED
from accelerate_nb.cli.parser import Parser, add_config_file, add_settings, said_settings
from accelerate_nb.cli.theirs import Theirs
from accelerate_nb.config import files, tpus
from accelerate_nb.config.environment import already_launched, saying
from accelerate_nb.config.fields import Setting
from accelerate_nb.config.run import RunConfig, differing, grouped, resolve
from accelerate_nb.config.tpus import Tpus
from accelerate_nb.devices.probe import probe
from accelerate_nb.errors import ConfigurationError, LaunchError, StoppedError, WorkerError

if TYPE_CHECKING:
    from accelerate_nb.cli.notebooks import Readable
    from accelerate_nb.launching.run import FrontEnd, Run
    from accelerate_nb.launching.scripts import Program

PROG = "accelerate-nb launch"
_USAGE = f"{PROG} [settings] (script.py | -m module | notebook.ipynb | --no_python program) [arguments]"
_EPILOG = """\
examples:
  accelerate-nb launch train.py --lr 3e-4              one process for each accelerator of this machine
  accelerate-nb launch -n 2 --cpu train.py             two connected processes on the CPU
  accelerate-nb launch -m package.train                a module, as in `python -m`
  accelerate-nb launch train.ipynb -n 4 -- --lr 3e-4   a notebook; its parameters stand behind `--`
  accelerate-nb launch train.ipynb --execute -n 4      the notebook itself, in a kernel; it keeps its outputs
  accelerate-nb launch --tpu train.py                  all cores of this machine's TPU, through torch_xla
  accelerate-nb launch --dry-run train.py              tell what would happen, and start nothing

Flags may be written with hyphens or underscores. Every flag of Hugging Face's `accelerate launch` is known; `--dry-run` tells
which of them change nothing. What is not said here is taken from the environment, then from the configuration file.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Say which arguments the command takes."""
    parser.usage, parser.epilog = _USAGE, _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    own = parser.add_argument_group("What is run, and what is told of it")
    own.add_argument("-m", "--module", action="store_true", help="Run a module, as `python -m` does.")
    own.add_argument(
        *("--no-python", "--no_python"),
        action="store_true",
        help="Run any program; it finds its rank in its environment.",
    )
    add_config_file(own, "The configuration file; '' for none. Without it, the one that `accelerate config` writes.")
    own.add_argument(
        *("--dry-run", "--dry_run"), action="store_true", help="Tell what would be started, and why; start nothing."
    )
    own.add_argument(
        "--execute",
        action="store_true",
        help="Execute a notebook as a notebook, and write it back with its outputs. Settings hold for its launches and its "
        "%%%%accelerate cells, as far as these say nothing themselves: num_processes=4 in a cell wins over --num-processes.",
    )
    own.add_argument(
        *("-o", "--output"),
        metavar="NOTEBOOK",
        help="Where to write the executed notebook, in place of the notebook itself.",
    )
    own.add_argument(
        *("--only-rank", "--only_rank"),
        metavar="R,...",
        help="Show the lines of these ranks only; all are kept in the run's folder.",
    )
    own.add_argument(
        *("-q", "--quiet"),
        action="store_true",
        help="Show the lines of ranks, and of a failure its cause; nothing else.",
    )
    own.add_argument("-t", "--tee", metavar="0-3", default="0", help=argparse.SUPPRESS)
    of_tpus = theirs.add_flags(parser)
    of_tpus.add_argument(*("--tpu-name", "--tpu_name"), metavar="NAME", help="The name of a TPU pod; as --tpu-cluster.")
    of_tpus.add_argument(*("--tpu-zone", "--tpu_zone"), metavar="ZONE", help="The zone of Google's cloud it is in.")
    add_settings(parser, _SETTINGS)
    parser.add_argument("what", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _as_flag(one: Setting) -> Setting:
    """A setting as it is spelled here: `--quiet` alone is Accelerate's word for telling less."""
    if one.name == "quiet":
        return replace(one, name="quiet_seconds", keys=("quiet_seconds",))
    return replace(one, keys=(*one.keys, "log_dir")) if one.name == "folder" else one


_SORTED = tuple(chain.from_iterable(grouped().values()))
_SETTINGS = tuple(map(_as_flag, _SORTED))
_OURS = {shown.name: one.name for shown, one in zip(_SETTINGS, _SORTED, strict=True)}


@dataclass(frozen=True, slots=True)
class Asked:
    """What a command line asks for, and the configuration that it leads to with the environment and the file."""

    said: Mapping[str, Any]
    file: Path | None
    content: Mapping[str, Any] | None
    config: RunConfig
    theirs: Theirs
    only_ranks: tuple[int, ...] | None
    quiet: bool
    tpus: Tpus
    on_tpus: bool

    @property
    def variables(self) -> dict[str, str]:
        """What the environment of workers says beyond the settings."""
        more = self.tpus.variables(self.config.training.mixed_precision) if self.on_tpus else {}
        return {**more, **self.theirs.variables()}

    @property
    def function(self) -> str | None:
        """What each worker calls of the program, in place of running it."""
        return self.tpus.function if self.on_tpus else None

    @property
    def is_for_a_pod(self) -> bool:
        """Whether each machine of a TPU pod is to run it."""
        return self.on_tpus and self.tpus.is_pod

    def tell_surprises(self) -> None:
        """Say which flags change nothing though somebody wrote them."""
        for surprise in self.theirs.surprises(on_tpus=self.on_tpus):
            print(f"{PROG}: {surprise}", file=sys.stderr)


def run(arguments: argparse.Namespace) -> int:
    """Do it; gives the exit code."""
    _take_seconds(arguments)
    if not arguments.what:
        raise ConfigurationError(f"Nothing was named that is to be run. The usage is: {_USAGE}")
    said, *rest = arguments.what
    if programs.is_notebook(said) and not (arguments.module or arguments.no_python):
        return _run_notebook(said, rest, arguments)
    _refuse_execution(arguments)
    asked = _asked(arguments)
    if asked.is_for_a_pod:
        return _print_for_a_pod([*(["-m"] if arguments.module else []), said, *rest], asked)
    _refuse_any_program(arguments, asked)
    program = programs.program(
        said, rest, module=arguments.module, executable=arguments.no_python, function=asked.function
    )
    return _run_program(program, asked, arguments.dry_run)


def _run_notebook(said: str, rest: list[str], arguments: argparse.Namespace) -> int:
    from accelerate_nb.cli import notebooks

    flags, parameters = notebooks.split(rest)
    if not {"-h", "--help"}.isdisjoint(flags):
        print(f"{_parser().format_help()}\n{notebooks.readable(said).help()}")
        return 0
    arguments.what = []
    try:
        _parser().parse_args(flags, arguments)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error} What is for {said} itself goes behind `--`.") from None
    _take_seconds(arguments)
    notebooks.refuse_words(said, arguments.what)
    if arguments.execute:
        return _execute(said, parameters, arguments)
    _refuse_execution(arguments)
    asked = _asked(arguments)
    if asked.is_for_a_pod:
        return _print_for_a_pod([said, *(["--", *parameters] if parameters else [])], asked)
    readable = notebooks.readable(said)
    readable.check(parameters)
    for note in readable.script.notes:
        print(f"{PROG}: {note}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="accelerate_nb_") as folder:
        return _run_program(readable.program(parameters, Path(folder)), asked, arguments.dry_run, readable)


def _execute(said: str, parameters: list[str], arguments: argparse.Namespace) -> int:
    from accelerate_nb.cli import execute

    if arguments.only_rank is not None:
        raise ConfigurationError("--only-rank chooses lines of a terminal, and --execute puts them into the notebook.")
    asked = _asked(arguments)
    asked.tell_surprises()
    output = None if arguments.output is None else Path(arguments.output)
    settings = execute.told(asked.said, arguments.config_file, asked.config.launching.panel, os.environ)
    wish = execute.wish(said, output, parameters, {**asked.variables, **settings}, quiet=asked.quiet)
    return execute.tell(wish) if arguments.dry_run else execute.run(wish)


def _refuse_execution(arguments: argparse.Namespace) -> None:
    if arguments.execute:
        raise ConfigurationError(
            "--execute was given, and only a notebook can be executed so. Name one, or leave it out."
        )
    if arguments.output is not None:
        raise ConfigurationError(
            "--output was given, which names an executed notebook. Add --execute, or leave it out."
        )


def _refuse_any_program(arguments: argparse.Namespace, asked: Asked) -> None:
    if arguments.no_python and asked.on_tpus:
        raise ConfigurationError(
            "--no_python was given for a launch through torch_xla, and which core of a TPU is whose is known only inside the "
            "Python of each worker. Run a script or a module of Python, or pass --cpu."
        )


def _print_for_a_pod(what: list[str], asked: Asked) -> int:
    """Print the line that launches something on every machine of a pod, and say what it is; gives the exit code."""
    from accelerate_nb.cli import pods

    asked.tell_surprises()
    pod = pods.pod_of(asked.tpus)
    said = pods.command_of_a_machine(asked.tpus, differing(asked.config), asked.theirs.variables(), what)
    print(pod.ssh(said), flush=True)
    print(
        f"{PROG}: nothing was started here. The line above has every machine of the TPU {pod.name} launch this on its own "
        "cores; copy it, or pipe it into sh. It needs gcloud, logged in to your project; on each machine it needs "
        "accelerate-nb and all that it runs, at the same path (`accelerate-nb tpu-config` prints lines that put them there).",
        file=sys.stderr,
    )
    return 0


def _run_program(program: Program, asked: Asked, is_dry: bool, notebook: Readable | None = None) -> int:
    asked.tell_surprises()
    if is_dry:
        from accelerate_nb.cli import dry_run

        return dry_run.tell(asked, program, notebook)
    return _conduct(program, asked)


# -------------------------------------------------------------------------------------------------------------- reading


def _parser() -> Parser:
    parser = Parser(prog=PROG)
    configure(parser)
    return parser


def _take_seconds(arguments: argparse.Namespace) -> None:
    """`--quiet 30` is the setting of that name, as the other front ends write it; a program is never called by a number."""
    if arguments.quiet and arguments.what and re.fullmatch(r"\d+(\.\d*)?|\.\d+", arguments.what[0]):
        seconds, *words = arguments.what
        arguments.quiet, arguments.what = False, []
        _parser().parse_args(["--quiet-seconds", seconds, *words], arguments)


def _asked(arguments: argparse.Namespace) -> Asked:
    found = said_settings(arguments, _SETTINGS)
    said = {_OURS.get(name, name): value for name, value in found.items()}
    flags = theirs.said(arguments, cpu=bool(said.get("cpu")))
    said = _together(flags.settings(), said)
    file = files.find(os.environ, arguments.config_file)
    content = files.read(file) if file is not None else None
    config = resolve(said, os.environ, content)
    _check_surroundings()
    on_tpus = _is_on_tpus(config)
    # torchrun's word for what happens anyway: lines are shown, and kept in files
    theirs.check_streams(arguments.tee)
    return Asked(
        said=said,
        file=file,
        content=content,
        config=config,
        theirs=flags,
        only_ranks=_ranks(arguments.only_rank),
        quiet=arguments.quiet,
        tpus=_tpus(arguments, flags, content) if on_tpus else Tpus(),
        on_tpus=on_tpus,
    )


def _together(flags: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """What flags of theirs say of settings, and what the settings' own flags say."""
    for name, value in flags.items():
        if said.get(name, value) != value:
            raise ConfigurationError(
                f"--tpu was given, which asks for {name}={value}, together with {name}={said[name]}. Leave one of them out."
            )
    return {**flags, **said}


def _is_on_tpus(config: RunConfig) -> bool:
    wish = config.launching
    return wish.engine == "xla" or (wish.engine == "auto" and not wish.cpu and probe().kind == "xla")


def _tpus(arguments: argparse.Namespace, flags: Theirs, content: Mapping[str, Any] | None) -> Tpus:
    """What is said of TPUs: a flag wins over the file."""
    said = flags.tpus()
    named = {"name": arguments.tpu_name, "zone": arguments.tpu_zone}
    said.update({name: value for name, value in named.items() if value is not None})
    # whoever names a TPU means that one, and not what this machine has
    is_pod = {"is_pod": True} if arguments.tpu_name else {}
    return replace(tpus.of(content or {}), **{**is_pod, **said})


def _check_surroundings() -> None:
    if already_launched(os.environ):
        raise LaunchError(
            f"A launch was asked for inside rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, which a launcher started "
            "already. Run the script itself there, or unset RANK and WORLD_SIZE."
        )


def _ranks(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ConfigurationError(
            f"--only-rank was given {text!r}, but should be ranks, such as 0 or 0,2. Leave it out to see every rank's lines."
        )
    return tuple(map(int, parts))


# -------------------------------------------------------------------------------------------------------------- running


def _conduct(program: Program, asked: Asked) -> int:
    from accelerate_nb.cli.signals import handed_on
    from accelerate_nb.launching.functions import prepare

    with saying(asked.variables, os.environ), _input_of(program) as whole:
        front_end = _front_end(asked)
        started = prepare(whole, (), asked.config, front_end)
        check_ranks(asked, len(started.view.ranks))
        with handed_on(started) as heard:
            code = _waited_for(started, front_end)
        return BY_SIGNAL + heard[0] if heard else code


@contextmanager
def _input_of(program: Program) -> Iterator[Program]:
    """The program with this command's standard input, which rank 0 reads."""
    from accelerate_nb.launching.scripts import standard_input

    stdin = standard_input()
    try:
        yield replace(program, stdin=stdin)
    finally:
        if stdin is not None:
            stdin.close()


def _front_end(asked: Asked) -> FrontEnd:
    from accelerate_nb.cli.terminal import terminal

    is_off = asked.config.launching.panel == "off"
    return terminal(
        only_ranks=() if is_off else asked.only_ranks,
        prefix_template=asked.config.launching.log_line_prefix_template,
        quiet=asked.quiet or is_off,
    )


def check_ranks(asked: Asked, size: int) -> None:
    """Ranks whose lines are wanted are among those that there are."""
    if beyond := [rank for rank in asked.only_ranks or () if rank >= size]:
        raise ConfigurationError(
            f"--only-rank {beyond[0]} was asked for, but there are only ranks 0 to {size - 1}. Name one of them."
        )


def _waited_for(run: Run, front_end: FrontEnd) -> int:
    try:
        run.start().wait()
    except WorkerError as error:
        if not (isinstance(error, StoppedError) or getattr(front_end, "has_told_failure", False)):
            print(f"{PROG}: {error}", file=sys.stderr)
        return exit_code(error)
    except KeyboardInterrupt:
        # one that came before the wait, which ends the workers at its own
        run.stop(timeout=0)
        return INTERRUPTED
    except BrokenPipeError:
        return BROKEN_PIPE
    return 0


def exit_code(error: WorkerError) -> int:
    """
    What the command ends with: the code with which the program itself ended, where it did so.

    A process that ends itself with 0 has done nothing wrong, though nobody waited for its Python to end.
    """
    first = next((one for one in error.failures if one.rank == error.rank), None)
    if first is None:
        return 1
    if first.type == "SystemExit":
        return int(first.message) & 0xFF if re.fullmatch(r"-?\d+", first.message) else 1
    if first.exit_code is None or first.exit_code < 0:
        return 1
    return first.exit_code or int(any(one.exit_code != 0 for one in error.failures))
