"""The nodes of a run that is launched on each of them, as one of them sees them."""

from __future__ import annotations

from accelerate_nb.launching.planning.placement import Placement
from accelerate_nb.launching.rendezvous.settings import interface_variables
from accelerate_nb.transport.payload import Payload


class LaunchedNodes:
    """What both sides of such a run know: the ranks of this node, from `first_rank` on, and the `address` by which it meets the others."""

    def __init__(self, local: Placement, first_rank: int, address: str) -> None:
        self.local, self.first_rank, self._address = local, first_rank, address

    @property
    def ranks_here(self) -> range:
        """The ranks on this machine."""
        return range(self.first_rank, self.first_rank + self.local.size)

    def check_payload(self, payload: Payload) -> None:
        """Everything can be in it: it stays on this machine."""

    def variables(self) -> dict[str, str]:
        """The variables that have collectives use the interface between the nodes."""
        return interface_variables(self._address)
