"""A worker's place in a run, as its environment tells it: torchrun's own contract."""

from __future__ import annotations

import sys
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"
# The variables that differ from rank to rank.
OWN_VARIABLES = ("RANK", "LOCAL_RANK", "ROLE_RANK")
_LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


@dataclass(frozen=True, slots=True)
class Seat:
    """Who a worker is among `size` workers, and where they meet."""

    rank: int
    size: int
    port: int
    run: str
    attempt: int = 0
    max_restarts: int = 0
    # how many ranks are threads of one process
    per_process: int = 1

    @property
    def process(self) -> int:
        """Which of the run's processes the rank is in."""
        return self.rank // self.per_process

    @property
    def processes(self) -> int:
        """How many processes there are."""
        return -(-self.size // self.per_process)

    def environ(self) -> dict[str, str]:
        """
        The variables that torchrun sets for a worker on one machine.

        `TORCHELASTIC_USE_AGENT_STORE` makes `init_process_group("env://")` a client of the store that is there already,
        on every rank (see `torch.distributed.rendezvous`).
        """
        rank, size = str(self.rank), str(self.size)
        return {
            **dict.fromkeys(OWN_VARIABLES, rank),
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "ROLE_WORLD_SIZE": size,
            "ROLE_NAME": "default",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": self.run,
            "TORCHELASTIC_RESTART_COUNT": str(self.attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
        }


def on_loopback() -> dict[str, str]:
    """The variables that keep collectives on one machine off every other network; what the person set stays."""
    return {
        "GLOO_SOCKET_IFNAME": _LOOPBACK_INTERFACE,
        "NCCL_SOCKET_IFNAME": _LOOPBACK_INTERFACE,
        "TP_SOCKET_IFNAME": _LOOPBACK_INTERFACE,
    }
