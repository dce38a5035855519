"""Agents on this machine that pretend to be nodes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass

from accelerate_nb.launching.nodes.node_engine import PlacedAgent
from accelerate_nb.transport.channel import Channel
from accelerate_nb.transport.memory_file import memory_file
from accelerate_nb.transport.rank_info import LOOPBACK


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
