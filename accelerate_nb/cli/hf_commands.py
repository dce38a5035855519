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
from accelerate_nb.config.hf_keys import OF_ACCELERATE

# As Accelerate has it: a text, as it was when the module was imported.
default_config_file = str(hf_files.default_path(os.environ))
# Accelerate's values of keys that a file leaves out; of those that are not here, `None`, or an empty `..._config`.
_LEFT_OUT = {
    "compute_environment": "LOCAL_MACHINE", "debug": False, "downcast_bf16": False, "enable_cpu_affinity": False,
    "machine_rank": 0, "main_training_function": "main", "num_machines": 1, "num_processes": -1, "rdzv_backend": "static",
    "same_network": False, "tpu_use_cluster": False, "tpu_use_sudo": False, "use_cpu": False,
}  # fmt: skip


class LoadedConfig(SimpleNamespace):
    """A configuration file: each key of Accelerate's is an attribute, with Accelerate's default where the file has none."""

    def __init__(self, content: dict[str, Any]) -> None:
        empty: dict[str, Any] = {name: {} if name.endswith("_config") else None for name in OF_ACCELERATE}
        super().__init__(**{**empty, **_LEFT_OUT, **content})
        if self.distributed_type == "NO" and "num_processes" not in content:
            self.num_processes = 1

    def to_dict(self) -> dict[str, Any]:
        """The keys with their values, without those that have none."""
        return {name: value for name, value in vars(self).items() if value not in (None, {})}


def load_config_from_file(config_file: str | os.PathLike[str] | None) -> LoadedConfig:
    """
    The content of a configuration file, as today's Accelerate spells it; `None` is for the default one.

    `FileNotFoundError` where there is none, `ConfigurationError` for one that can't be read.

    >>> load_config_from_file("my_config.yaml").num_processes  # doctest: +SKIP
    2
    """
    path = Path(default_config_file if config_file is None else config_file).expanduser()
    if not path.is_file():
        raise FileNotFoundError(
            f"The configuration file {path} was requested, and does not exist. Correct its path, or write it with "
            "`accelerate-nb config`."
        )
    return LoadedConfig(hf_files.whole(path))


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
