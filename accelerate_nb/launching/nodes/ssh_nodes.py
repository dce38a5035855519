"""Agents on other machines, started by the system's OpenSSH client."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from accelerate_nb.errors import LaunchError
from accelerate_nb.launching.nodes.node_engine import PlacedAgent
from accelerate_nb.launching.nodes.remote_command import agent_command, start_command

# No terminal, no question that nobody could answer, and no wait for ever.
_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")


@dataclass(frozen=True, slots=True)
class SshNodes:
    """
    Places an agent by `command HOST python -m ...`, which speaks over the connection's own standard input and output.

    Keys, names of hosts, jump hosts and shared connections are those of the person's own configuration.
    """

    command: tuple[str, ...]
    python: str

    label = "ssh"
    inherits_environment = True

    def place(self, node: str) -> PlacedAgent:
        """Start the agent of a host; raises `LaunchError` where there is no client."""
        try:
            return start_command([*self.command, *_OPTIONS, node, f"exec {shlex.join(agent_command(self.python))}"])
        except OSError as error:
            raise LaunchError(
                f"hosts were requested, and {self.command[0]!r}, which reaches them, can't be started: {error.strerror}. "
                "Install OpenSSH's client (on Debian: apt install openssh-client), or name yours as ssh_command."
            ) from None

    def replacement(self, _: str) -> None:
        """None: hosts are named."""

    def advice(self, node: str) -> str:
        """The same command with another purpose."""
        words = [*self.command, node, shlex.join([self.python, "-c", "import accelerate_nb"])]
        return f"Try `{shlex.join(words)}` in a terminal, which has to end without a question or an error"
