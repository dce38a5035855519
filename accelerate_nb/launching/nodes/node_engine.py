"""The interface of an engine for several nodes, which places one agent on each and knows nothing of what they do."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import Protocol

from accelerate_nb.transport.channel import Channel


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
