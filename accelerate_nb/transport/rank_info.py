"""A worker's rank in a run, as its environment has it: torchrun's own contract."""

from __future__ import annotations

import sys
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"
# The variables that differ from rank to rank.
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "ROLE_RANK")
_LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


@dataclass(frozen=True, slots=True)
class RankInfo:
    """A worker's rank among `size` workers, and the port of their rendezvous."""

    rank: int
    size: int
    port: int
    run: str
    restart_count: int = 0
    max_restarts: int = 0
    # how many ranks are threads of one process
    ranks_per_process: int = 1

    @property
    def process(self) -> int:
        """The number of the process that the rank is in."""
        return self.rank // self.ranks_per_process

    @property
    def processes(self) -> int:
        """The number of processes."""
        return -(-self.size // self.ranks_per_process)

    def environ(self) -> dict[str, str]:
        """
        The variables that torchrun sets for a worker on one machine.

        `TORCHELASTIC_USE_AGENT_STORE` makes `init_process_group("env://")` a client of the store that is there already,
        on every rank (see `torch.distributed.rendezvous`).
        """
        rank, size = str(self.rank), str(self.size)
        return {
            **dict.fromkeys(RANK_VARIABLES, rank),
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
            "TORCHELASTIC_RESTART_COUNT": str(self.restart_count),
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
        }


def on_loopback() -> dict[str, str]:
    """The variables that keep collectives on one machine off every other network; what the person set stays."""
    return dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), _LOOPBACK_INTERFACE)
