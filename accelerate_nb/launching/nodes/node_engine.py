"""Engines for several nodes, which place one agent on each and know nothing of what they do: on this machine, and over ssh."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from accelerate_nb.errors import LaunchError
from accelerate_nb.transport.channel import Channel
from accelerate_nb.transport.memory_file import memory_file
from accelerate_nb.transport.worker_spec import LOOPBACK


@dataclass(frozen=True, slots=True)
class PlacedAgent:
    """
    An agent that was started: the channel to it, the process on this machine that it is or that leads to it, and its output.

    Neither of the latter is there for an agent that was started on its own machine.
    """

    channel: Channel
    process: subprocess.Popen[bytes] | None = None
    output: int | None = None


class NodeEngine(Protocol):
    """A way to place agents; a frozen value, which is equal where agents that were placed before can serve again."""

    @property
    def label(self) -> str:
        """The way to its agents, as a person knows it."""

    @property
    def inherits_environment(self) -> bool:
        """Whether workers have their node's own environment, rather than that of this process."""

    def place(self, node: str) -> PlacedAgent:
        """Start the agent of a node; returns before it is there."""

    def replacement(self, node: str) -> str | None:
        """The node on which it has started the agent of a lost one, by itself, which may be the same; `None` where it starts none."""

    def advice(self, node: str) -> str:
        """The command that shows a person why an agent can't be started there, as a sentence."""


def agent_command(python: str) -> list[str]:
    """The command of an agent that speaks over its standard input and output."""
    return [python, "-m", "accelerate_nb.launching.node_agent.agent_process", "-"]


def start_command(words: Sequence[str]) -> PlacedAgent:
    """Start the command, in a session of its own; raises `OSError` where it is not there."""
    near, far = socket.socketpair()
    output = memory_file("accelerate_nb_agent")
    try:
        with far:
            process = subprocess.Popen(
                words, stdin=far.fileno(), stdout=far.fileno(), stderr=output, start_new_session=True
            )
    except OSError:
        near.close()
        os.close(output)
        raise
    return PlacedAgent(Channel(near, passes_descriptors=False, after_greeting=True), process, output)


@dataclass(frozen=True, slots=True)
class LocalNodes:
    """Places every agent on this machine, in a session of its own, over a Unix socket."""

    label = "this machine"
    inherits_environment = False

    def place(self, node: str) -> PlacedAgent:
        """Start an agent."""
        near, far = socket.socketpair()
        output = memory_file("accelerate_nb_agent")
        with far:
            process = subprocess.Popen(
                [sys.executable, "-m", "accelerate_nb.launching.node_agent.agent_process", str(far.fileno()), LOOPBACK],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[far.fileno()],
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        return PlacedAgent(Channel(near), process, output)

    def replacement(self, _: str) -> None:
        """None: this machine is there or lost."""

    def advice(self, node: str) -> str:
        """It is started as any other Python of this environment."""
        return f"Try `{sys.executable} -c 'import accelerate_nb'`"


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
