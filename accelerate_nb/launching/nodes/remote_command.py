"""A command of this machine that runs an agent on another one, and passes on its standard input and output."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence

from accelerate_nb.launching.nodes.node_engine import PlacedAgent
from accelerate_nb.transport.channel import Channel
from accelerate_nb.transport.memory_file import memory_file


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
