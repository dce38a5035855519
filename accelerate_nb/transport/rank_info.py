"""A worker's rank in a run, as its environment has it: torchrun's own contract."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import NamedTuple

LOOPBACK = "127.0.0.1"
# The variables by which gloo, NCCL and TensorPipe choose an interface.
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


class MasterAddress(NamedTuple):
    """The host and the port of the store at which the ranks find each other."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class RankInfo:
    """
    A worker's rank among `size` on `nodes` machines, its place on its own, and the store of their rendezvous.

    `run` is the run's name, `restart_count` how often its workers were started again, of at most `max_restarts` times.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    master: MasterAddress
    run: str
    node_rank: int = 0
    nodes: int = 1
    restart_count: int = 0
    max_restarts: int = 0

    def environ(self) -> dict[str, str]:
        """
        The variables that torchrun sets for a worker.

        `TORCHELASTIC_USE_AGENT_STORE` makes `init_process_group("env://")` a client of the store that is there already,
        on every rank (see `torch.distributed.rendezvous`).
        """
        rank, size = str(self.rank), str(self.size)
        return {
            "RANK": rank,
            "LOCAL_RANK": str(self.local_rank),
            "ROLE_RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "ROLE_WORLD_SIZE": size,
            "ROLE_NAME": "default",
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.nodes),
            "MASTER_ADDR": self.master.host,
            "MASTER_PORT": str(self.master.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": self.run,
            "TORCHELASTIC_RESTART_COUNT": str(self.restart_count),
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
        }


def on_loopback() -> dict[str, str]:
    """The variables that keep collectives on one machine off every other network; what the person set stays."""
    return on_interface(LOOPBACK_INTERFACE)


def on_interface(name: str) -> dict[str, str]:
    """The variables that have collectives go through one network interface."""
    return dict.fromkeys(INTERFACE_VARIABLES, name)
