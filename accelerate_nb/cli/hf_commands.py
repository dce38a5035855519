"""The functions behind Accelerate's command line that other packages call, on top of the commands here."""

import argparse
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from accelerate_nb.cli.commands import launch
from accelerate_nb.cli.launching.request import PROG
from accelerate_nb.cli.parser import CliParser
from accelerate_nb.config import hf_files

# As Accelerate has it: a text, as it was when the module was imported.
default_config_file = str(hf_files.default_path(os.environ))


class LoadedConfig(SimpleNamespace):
    """The content of a configuration file, each of its keys as an attribute."""

    def to_dict(self) -> dict[str, Any]:
        """The keys with their values."""
        return dict(vars(self))


def load_config_from_file(config_file: str | os.PathLike[str] | None) -> LoadedConfig:
    """
    The content of a configuration file, as today's Accelerate spells it; `None` is for the default one.

    `FileNotFoundError` where there is none, `ConfigurationError` for one that can't be read.

    >>> load_config_from_file("my_config.yaml").to_dict()  # doctest: +SKIP
    {'compute_environment': 'LOCAL_MACHINE', 'distributed_type': 'MULTI_GPU', 'num_processes': 2}
    """
    path = Path(default_config_file if config_file is None else config_file).expanduser()
    if not path.is_file():
        raise FileNotFoundError(
            f"The configuration file {path} was requested, and does not exist. Correct its path, or write it with "
            "`accelerate-nb config`."
        )
    return LoadedConfig(**hf_files.whole(path))


def launch_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The parser of `accelerate-nb launch`, which takes every flag of `accelerate launch`; one of `subparsers` where given."""
    parser: argparse.ArgumentParser = CliParser(prog=PROG) if subparsers is None else subparsers.add_parser("launch")
    launch.configure(parser)
    if subparsers is not None:
        parser.set_defaults(func=launch_command)
    return parser


def launch_command(args: argparse.Namespace) -> None:
    """
    Launch what the parser of `launch_command_parser` has read, and wait for it.

    `SystemExit` with the program's exit code where it did not end well, errors of this package where it could not begin.

    >>> launch_command(launch_command_parser().parse_args(["--cpu", "train.py", "--epochs", "2"]))  # doctest: +SKIP
    """
    if (code := launch.run(args)) != 0:
        raise SystemExit(code)
