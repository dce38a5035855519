"""`accelerate-nb`: finds the command, runs it, and reports its errors."""

import argparse
import errno
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from accelerate_nb import __version__
from accelerate_nb.cli.exit_codes import BROKEN_PIPE, INTERRUPTED
from accelerate_nb.cli.parser import CliParser
from accelerate_nb.errors import AccelerateNbError, ConfigurationError

NAME = "accelerate-nb"
_OPTIONS = {"-h", "--help", "--version"}
_DISK_IS_FULL = {errno.ENOSPC, errno.EDQUOT}
# What is wrong with a path that a person has named.
_PATH_IS_CLOSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG}


# The commands, with their help; each is a module of `commands/`.
COMMANDS = {
    "launch": "Run a script, a module or a notebook on every process.",
    "join": "Let a notebook on another machine run its launches on this one.",
    "export": "Write a notebook as a script.",
    "config": "Choose the settings that every launch begins with.",
    "test": "Try this machine and these settings with real processes.",
    "env": "Print the facts for a bug report.",
    "runs": "List past and present runs, and show their logs and reports.",
    "estimate-memory": "Estimate the memory that a model takes in training.",
    "merge-weights": "Make one file of the weights of a sharded checkpoint.",
    "tpu-config": "Print the line that runs commands on every machine of a TPU pod.",
    "completion": "Print what makes a shell complete these commands.",
}


def main(words: Sequence[str] | None = None) -> int:
    """Run a command line, by default this process's own; gives the exit code and never raises an error of the user's."""
    _open_closed_streams()
    try:
        arguments = list(sys.argv[1:] if words is None else words)
        word = arguments[0] if arguments else ""
        if word not in COMMANDS:
            is_launch = (arguments[1:] and word.startswith("-")) or word.lower().endswith((".py", ".ipynb"))
            if is_launch and _OPTIONS.isdisjoint(arguments):
                launch = shlex.join([NAME, "launch", *arguments])
                raise ConfigurationError(f"{word!r} is no command. To run a program on every process: {launch}")
            if word in _words_of_runs():
                line = shlex.join([NAME, "runs", *arguments])
                raise ConfigurationError(f"{word!r} is no command. To do this with a run: {line}")
            overview().parse_args(arguments)
            overview().print_help()
            return 2
        parser = CliParser(prog=f"{NAME} {word}", description=COMMANDS[word])
        module = _module(word)
        module.configure(parser)
        code: int = module.run(parser.parse_args(arguments[1:]))
        return code
    except AccelerateNbError as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigurationError) else 1
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        message = f"This needs torch, which is not installed for {sys.executable}. Install it: pip install torch"
        print(f"{NAME}: {message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        return _code_after(error)


def _open_closed_streams() -> None:
    """Let what is printed to a stream that the shell closed (`>&-`) go nowhere; Python would print it to the other one."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - it lasts as long as the process


def _code_after(error: OSError) -> int:
    """The exit code after an error of the surroundings, which is named; every other one is raised again."""
    from accelerate_nb.transport.worker_spec import current_folder

    if isinstance(error, BrokenPipeError) or error.errno in _DISK_IS_FULL:
        # what Python still holds for standard output goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        # what read this command's lines has gone
        return BROKEN_PIPE
    if error.errno in _DISK_IS_FULL:
        message = "No space is left on a disk to which this command writes. Free some, or write elsewhere."
    elif error.errno in _PATH_IS_CLOSED and error.filename is not None:
        message = f"{os.fsdecode(error.filename)} can't be used: {error.strerror}. Change its permissions, or name another path."
    elif not current_folder():
        message = "The current folder was removed. Change to another one: cd ~"
    else:
        raise error
    print(f"{NAME}: {message}", file=sys.stderr)
    return 1


def _module(word: str) -> Any:
    """The module of a command: its `configure` declares arguments, and its `run` does it and gives the exit code."""
    return import_module(f"accelerate_nb.cli.commands.{word.replace('-', '_')}")


def overview() -> CliParser:
    """The parser of `accelerate-nb --help`, which loads no command's module."""
    parser = CliParser(
        prog=NAME,
        description="Distributed PyTorch from notebooks and scripts.",
        epilog=f"`{NAME} COMMAND --help` lists the arguments of a command.",
    )
    parser.add_argument("--version", action="version", version=f"{NAME} {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for word, help_text in COMMANDS.items():
        commands.add_parser(word, help=help_text)
    return parser


def whole() -> CliParser:
    """The command line with all that each command takes, for what completes it in a shell."""
    parser = overview()
    choices = _choices(parser)
    for word in COMMANDS:
        _module(word).configure(choices[word])
    return parser


def _words_of_runs() -> Mapping[str, CliParser]:
    """The commands of `accelerate-nb runs`, which people type without `runs`."""
    parser = CliParser()
    _module("runs").configure(parser)
    return _choices(parser)


def _choices(parser: CliParser) -> Mapping[str, CliParser]:
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return commands.choices


if __name__ == "__main__":
    sys.exit(main())
