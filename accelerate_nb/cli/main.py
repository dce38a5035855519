"""`accelerate-nb`: finds the command, runs it, and reports its errors."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

from accelerate_nb import __version__
from accelerate_nb.cli.exit_codes import BROKEN_PIPE, INTERRUPTED
from accelerate_nb.cli.parser import CliParser
from accelerate_nb.errors import AccelerateNbError, ConfigurationError

NAME = "accelerate-nb"


class CommandModule(Protocol):
    """The interface of a command's module."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments of the command."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it; gives the exit code."""


@dataclass(frozen=True, slots=True)
class CliCommand:
    """A command of `accelerate-nb`: its word, its help and its module."""

    word: str
    help: str
    home: str

    def load(self) -> CommandModule:
        """The command's file."""
        return cast(CommandModule, import_module(f"accelerate_nb.cli.commands.{self.home}"))


COMMANDS = (
    CliCommand("launch", "Run a script, a module or a notebook on every process.", "launch"),
    CliCommand("join", "Let a notebook on another machine run its launches on this one.", "join"),
    CliCommand("export", "Write a notebook as a script.", "export"),
    CliCommand("config", "Choose the settings that every launch begins with.", "config"),
    CliCommand("test", "Try this machine and these settings with real processes.", "test"),
    CliCommand("env", "Print the facts for a bug report.", "env"),
    CliCommand("runs", "List past and present runs, and show their logs and reports.", "runs"),
    CliCommand("estimate-memory", "Estimate the memory that a model takes in training.", "estimate_memory"),
    CliCommand("merge-weights", "Make one file of the weights of a sharded checkpoint.", "merge_weights"),
    CliCommand("tpu-config", "Print the line that runs commands on every machine of a TPU pod.", "tpu_config"),
    CliCommand("completion", "Print what makes a shell complete these commands.", "completion"),
)


def main(words: Sequence[str] | None = None) -> int:
    """Run a command line, by default this process's own; gives the exit code and never raises an error of the user's."""
    try:
        arguments = list(sys.argv[1:] if words is None else words)
        command = next((item for item in COMMANDS if arguments[:1] == [item.word]), None)
        if command is None:
            _refuse_a_launch_without_its_word(arguments)
            overview().parse_args(arguments)
            overview().print_help()
            return 2
        module = command.load()
        parser = CliParser(prog=f"{NAME} {command.word}", description=command.help)
        module.configure(parser)
        return module.run(parser.parse_args(arguments[1:]))
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
    except BrokenPipeError:
        # what read this command's lines has gone; what Python still holds for it goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _refuse_a_launch_without_its_word(arguments: Sequence[str]) -> None:
    """`accelerate-nb -n 2 train.py`, as one writes for torchrun."""
    known = {"-h", "--help", "--version"}
    if (
        arguments
        and known.isdisjoint(arguments)
        and (arguments[0].startswith("-") or arguments[0].lower().endswith((".py", ".ipynb")))
    ):
        raise ConfigurationError(
            f"{arguments[0]!r} is no command. To run a program on every process: {shlex.join([NAME, 'launch', *arguments])}"
        )


def overview() -> CliParser:
    """The parser of `accelerate-nb --help`, which loads no command's module."""
    parser = CliParser(
        prog=NAME,
        description="Distributed PyTorch from notebooks and scripts.",
        epilog=f"`{NAME} COMMAND --help` lists the arguments of a command.",
    )
    parser.add_argument("--version", action="version", version=f"{NAME} {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        commands.add_parser(command.word, help=command.help)
    return parser


def whole() -> CliParser:
    """The command line with all that each command takes, for what completes it in a shell."""
    parser = overview()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for command in COMMANDS:
        command.load().configure(commands.choices[command.word])
    return parser


if __name__ == "__main__":
    sys.exit(main())
