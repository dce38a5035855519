"""The line of Google's `gcloud` that runs a command on every machine of a TPU pod; it is printed, and nobody here runs it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate_nb.config.spelling import flags
from accelerate_nb.config.tpus import Tpus
from accelerate_nb.errors import ConfigurationError

NAME = "accelerate-nb"


@dataclass(frozen=True, slots=True)
class Pod:
    """Where a pod is, as `gcloud` finds it; without a zone, in the one that `gcloud config` has."""

    name: str
    zone: str | None = None
    is_alpha: bool = False

    def ssh(self, command: str) -> str:
        """
        The line that runs a command on each of its machines, at once.

        >>> Pod("mine", "us-central2-b").ssh("echo $HOSTNAME")
        "gcloud compute tpus tpu-vm ssh mine --zone us-central2-b --worker=all --command 'echo $HOSTNAME'"
        """
        words = ["gcloud", *(["alpha"] if self.is_alpha else []), "compute", "tpus", "tpu-vm", "ssh", self.name]
        words += ["--zone", self.zone] if self.zone else []
        return shlex.join([*words, "--worker=all", "--command", command])


def pod_of(tpus: Tpus, *, is_alpha: bool = False) -> Pod:
    """Where the pod is that was asked for; `ConfigurationError` where nobody said its name."""
    if not tpus.name:
        raise ConfigurationError(
            "A launch on a TPU pod was asked for, and nobody said which. Name it with --tpu-name, and its zone with --tpu-zone, "
            "or write both into the configuration file with `accelerate-nb config`."
        )
    return Pod(tpus.name, tpus.zone, is_alpha)


def command_of_a_machine(
    tpus: Tpus, settings: Mapping[str, Any], variables: Mapping[str, str], what: Sequence[str]
) -> str:
    """
    What each machine of a pod runs: the launch of `what`, with these settings, on its own cores.

    A configuration file that lies there is not read: everything is said.
    """
    environment = [*tpus.environment, *(f"{name}={value}" for name, value in variables.items())]
    said = {name: value for name, value in settings.items() if name != "engine"}
    function = ["--main-training-function", tpus.function] if tpus.function else []
    words = [
        *(["sudo"] if tpus.sudo else []),
        *(["env", *environment] if environment else []),
        *(NAME, "launch", "--tpu", "--no-tpu-cluster", "--config-file="),
        *flags(said),
        *function,
        *(["--downcast-bf16"] if tpus.downcasts else []),
        *what,
    ]
    return shlex.join(words)
