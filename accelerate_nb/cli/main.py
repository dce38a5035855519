"""`accelerate-nb`: finds the command that was called, runs it, and says what went wrong in one place."""

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
from accelerate_nb.cli.codes import BROKEN_PIPE, INTERRUPTED
from accelerate_nb.cli.parser import Parser
from accelerate_nb.errors import AccelerateNbError, ConfigurationError

NAME = "accelerate-nb"


class Module(Protocol):
    """What the file of a command has."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Say which arguments the command takes."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it; gives the exit code."""


@dataclass(frozen=True, slots=True)
class Command:
    """A word behind `accelerate-nb`, what it does, and the file that does it."""

    word: str
    help: str
    home: str

    def load(self) -> Module:
        """The command's file."""
        return cast(Module, import_module(f"accelerate_nb.cli.{self.home}"))


COMMANDS = (
    Command("launch", "Run a script, a module or a notebook on every process.", "launch"),
    Command("export", "Write a notebook as a script.", "export"),
    Command("config", "Choose the settings that every launch begins with.", "config"),
    Command("test", "Try this machine and these settings with real processes.", "test"),
    Command("env", "Tell what a bug report needs to know.", "env"),
    Command("runs", "List past and present runs, and show their logs and reports.", "runs"),
    Command("estimate-memory", "Tell how much memory a model takes in training.", "estimate_memory"),
    Command("merge-weights", "Make one file of the weights of a sharded checkpoint.", "merge_weights"),
    Command("tpu-config", "Print the line that runs commands on every machine of a TPU pod.", "tpu_config"),
    Command("completion", "Print what makes a shell complete these commands.", "completion"),
)


def main(words: Sequence[str] | None = None) -> int:
    """Run a command line, by default this process's own; gives the exit code and never raises what a person caused."""
    try:
        said = list(sys.argv[1:] if words is None else words)
        command = next((one for one in COMMANDS if said[:1] == [one.word]), None)
        if command is None:
            _refuse_a_launch_without_its_word(said)
            overview().parse_args(said)
            overview().print_help()
            return 2
        module = command.load()
        parser = Parser(prog=f"{NAME} {command.word}", description=command.help)
        module.configure(parser)
        return module.run(parser.parse_args(said[1:]))
    except AccelerateNbError as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigurationError) else 1
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        told = f"This needs torch, which is not installed for {sys.executable}. Install it: pip install torch"
        print(f"{NAME}: {told}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # what read this command's lines has gone; what Python still holds for it goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _refuse_a_launch_without_its_word(said: Sequence[str]) -> None:
    """`accelerate-nb -n 2 train.py`, as one writes for torchrun."""
    own = {"-h", "--help", "--version"}
    if said and own.isdisjoint(said) and (said[0].startswith("-") or said[0].lower().endswith((".py", ".ipynb"))):
        raise ConfigurationError(
            f"{said[0]!r} is no command. To run a program on every process: {shlex.join([NAME, 'launch', *said])}"
        )


def overview() -> Parser:
    """What `accelerate-nb --help` shows: no command's file is loaded for it."""
    parser = Parser(
        prog=NAME,
        description="Distributed PyTorch from notebooks and scripts.",
        epilog=f"`{NAME} COMMAND --help` tells what a command takes.",
    )
    parser.add_argument("--version", action="version", version=f"{NAME} {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for one in COMMANDS:
        commands.add_parser(one.word, help=one.help)
    return parser


def whole() -> Parser:
    """The command line with all that each command takes, for what completes it in a shell."""
    parser = overview()
    (commands,) = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    for one in COMMANDS:
        one.load().configure(commands.choices[one.word])
    return parser


if __name__ == "__main__":
    sys.exit(main())
