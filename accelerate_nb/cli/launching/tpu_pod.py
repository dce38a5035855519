"""The line of Google's `gcloud` that runs a command on every machine of a TPU pod; it is only printed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate_nb.config.formats import flags
from accelerate_nb.config.tpu_pods import TpusConfig
from accelerate_nb.errors import ConfigurationError

NAME = "accelerate-nb"


@dataclass(frozen=True, slots=True)
class TpuPod:
    """The name and zone of a pod; without a zone, the one of `gcloud config`."""

    name: str
    zone: str | None = None
    is_alpha: bool = False

    def ssh(self, command: str) -> str:
        """
        The line that runs a command on each of its machines, at once.

        >>> TpuPod("mine", "us-central2-b").ssh("echo $HOSTNAME")
        "gcloud compute tpus tpu-vm ssh mine --zone us-central2-b --worker=all --command 'echo $HOSTNAME'"
        """
        words = ["gcloud", *(["alpha"] if self.is_alpha else []), "compute", "tpus", "tpu-vm", "ssh", self.name]
        words += ["--zone", self.zone] if self.zone else []
        return shlex.join([*words, "--worker=all", "--command", command])


def pod_of(tpus: TpusConfig, *, is_alpha: bool = False) -> TpuPod:
    """The requested pod; `ConfigurationError` where no name was given."""
    if not tpus.name:
        raise ConfigurationError(
            "A launch on a TPU pod was requested, but no pod was named. Name it with --tpu-name, and its zone with --tpu-zone, "
            "or write both into the configuration file with `accelerate-nb config`."
        )
    return TpuPod(tpus.name, tpus.zone, is_alpha)


def command_of_a_machine(
    tpus: TpusConfig, settings: Mapping[str, Any], variables: Mapping[str, str], what: Sequence[str]
) -> str:
    """
    The command of each machine of a pod: the launch of `what`, with these settings, on its own cores.

    A configuration file there is not read: the command has all settings.
    """
    environment = [*tpus.environment, *(f"{name}={value}" for name, value in variables.items())]
    machine_settings = {name: value for name, value in settings.items() if name != "engine"}
    function = ["--main-training-function", tpus.function] if tpus.function else []
    words = [
        *(["sudo"] if tpus.sudo else []),
        *(["env", *environment] if environment else []),
        *(NAME, "launch", "--tpu", "--no-tpu-cluster", "--config-file="),
        *flags(machine_settings),
        *function,
        *(["--downcast-bf16"] if tpus.downcasts else []),
        *what,
    ]
    return shlex.join(words)
