"""`accelerate-nb tpu-config`: the line that runs commands on every machine of a TPU pod, before a training is launched there."""

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate_nb.cli.parser import add_config_file, spellings
from accelerate_nb.config import hf_files, hf_keys
from accelerate_nb.config.formats import flags
from accelerate_nb.config.hf_keys import TpusConfig
from accelerate_nb.errors import ConfigurationError

_PACKAGE = "accelerate-nb"
_EXAMPLES = """examples:
  accelerate-nb tpu-config --tpu-name mine --tpu-zone us-central2-b --install-accelerate
  accelerate-nb tpu-config --command 'git clone https://github.com/me/project' 'pip install -r project/requirements.txt'
  accelerate-nb tpu-config --command-file setup.sh | sh          and run the line at once
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.description = (
        "Print the line of gcloud that runs commands on every machine of a TPU pod. Nothing is run from here:\n"
        "copy the line, or pipe it into sh. What is not given here is taken from the configuration file."
    )
    parser.epilog = _EXAMPLES
    add_config_file(parser, "The configuration file, in place of the default one; '' for none.")
    parser.add_argument(*spellings("tpu_name"), metavar="NAME", help="The name of the TPU.")
    parser.add_argument(*spellings("tpu_zone"), metavar="ZONE", help="The zone of Google's cloud it is in.")
    parser.add_argument("--command", metavar="COMMAND", nargs="+", action="append", help="Commands, in their order.")
    parser.add_argument(*spellings("command_file"), metavar="FILE", help="A file that has a command in each line.")
    parser.add_argument(
        *spellings("install_accelerate"), action="store_true", help=f"Install {_PACKAGE} before all commands."
    )
    parser.add_argument(
        *spellings("accelerate_version"),
        metavar="VERSION",
        default="latest",
        help=f"Which {_PACKAGE} to install: 'latest', a version, or anything else that pip can install.",
    )
    parser.add_argument(*spellings("use_alpha"), action="store_true", help="Call `gcloud alpha`.")
    # in Accelerate, what makes it print the line and not run it
    parser.add_argument("--debug", action="store_true", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Print the line; gives the exit code."""
    path = hf_files.find(os.environ, arguments.config_file)
    content = {} if path is None else hf_files.read(path)
    found = hf_keys.tpus_of(content)
    tpus = replace(found, name=arguments.tpu_name or found.name, zone=arguments.tpu_zone or found.zone)
    commands = _commands(arguments, content.get("command_file"), content.get("commands"))
    if arguments.install_accelerate:
        version = arguments.accelerate_version
        package = f"{_PACKAGE}=={version}" if version[:1].isdigit() else version
        commands.insert(0, f"pip install {f'-U {_PACKAGE}' if version == 'latest' else shlex.quote(package)}")
    # where Accelerate's own command works, too
    print(line_for_a_pod(tpus, "; ".join(["cd /usr/share", *commands]), is_alpha=arguments.use_alpha), flush=True)
    print(
        f"accelerate-nb tpu-config: nothing was run. The line above runs this on every machine of the TPU {tpus.name}; copy it, "
        "or pipe it into sh. It needs gcloud, logged in to your project.",
        file=sys.stderr,
    )
    return 0


def _commands(arguments: argparse.Namespace, file: str | None, commands: list[str] | None) -> list[str]:
    """The commands to run: those given here, else those of the configuration file."""
    given = [command for several in arguments.command or [] for command in several]
    if path := arguments.command_file or (None if given else file):
        try:
            lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
            raise ConfigurationError(
                f"The commands in {path} were requested, but that file can't be read: {reason}. Correct its path."
            ) from None
        return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    given = given or [str(command) for command in commands or []]
    if not given and not arguments.install_accelerate:
        raise ConfigurationError(
            "A line for a TPU pod was requested, but no command was given. Pass --command or --command-file, or "
            "--install-accelerate."
        )
    return given


def line_for_a_pod(tpus: TpusConfig, command: str, *, is_alpha: bool = False) -> str:
    """The line of gcloud that runs a command on each machine of a pod, at once; an error where no name was given."""
    # without a zone it is in the one of `gcloud config`
    if not tpus.name:
        raise ConfigurationError(
            "A launch on a TPU pod was requested, but no pod was named. Name it with --tpu-name, and its zone with --tpu-zone, "
            "or write both into the configuration file with `accelerate-nb config`."
        )
    words = ["gcloud", *(["alpha"] if is_alpha else []), "compute", "tpus", "tpu-vm", "ssh", tpus.name]
    words += ["--zone", tpus.zone] if tpus.zone else []
    return shlex.join([*words, "--worker=all", "--command", command])


def command_of_a_machine(
    tpus: TpusConfig, settings: Mapping[str, Any], variables: Mapping[str, str], what: Sequence[str]
) -> str:
    """The command of each machine of a pod: the launch of `what`, with these settings, on its own chips."""
    # a configuration file there is not read: the command has all settings
    environment = [*tpus.environment, *(f"{name}={value}" for name, value in variables.items())]
    words = [
        *(["sudo"] if tpus.sudo else []),
        *(["env", *environment] if environment else []),
        *(_PACKAGE, "launch", "--tpu", "--no-tpu-cluster", "--config-file="),
        *flags({name: value for name, value in settings.items() if name != "engine"}),
        *(["--main-training-function", tpus.function] if tpus.function else []),
        *(["--downcast-bf16"] if tpus.downcasts else []),
        *what,
    ]
    return shlex.join(words)
