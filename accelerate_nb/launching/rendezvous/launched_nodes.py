"""The nodes of a run that is launched on each of them, as one of them sees them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from accelerate_nb.launching.planning.placement import Placement
from accelerate_nb.launching.rendezvous.settings import interface_variables
from accelerate_nb.transport.messages import Message
from accelerate_nb.transport.payload import Payload


class LaunchedNodes(ABC):
    """What both sides of such a run know: the ranks of this node, from `first_rank` on, and the `address` by which it meets the others."""

    def __init__(self, local: Placement, first_rank: int, address: str) -> None:
        self.local, self.first_rank, self._address = local, first_rank, address

    @property
    def ranks_here(self) -> range:
        """The ranks on this machine."""
        return range(self.first_rank, self.first_rank + self.local.size)

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of this node for people."""

    @abstractmethod
    def join_session(self, on_message: Callable[[Message], None]) -> None:
        """Have a session here take what node 0 sends to those of all nodes, in a thread of its own."""

    @abstractmethod
    def report(self, message: Message) -> None:
        """Report what has happened in this node's session to node 0."""

    def check_payload(self, payload: Payload) -> None:  # noqa: B027 - nothing to check is right for all of these
        """Everything can be in it: it stays on this machine."""

    def variables(self) -> dict[str, str]:
        """The variables that have collectives use the interface between the nodes."""
        return interface_variables(self._address)
