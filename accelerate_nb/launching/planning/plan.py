"""Everything that an engine needs to start a group of workers, and nothing more."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

from accelerate_nb.errors import LaunchError
from accelerate_nb.launching.order import Order, Surroundings
from accelerate_nb.launching.payload import Payload
from accelerate_nb.launching.seat import LOOPBACK, Seat
from accelerate_nb.launching.wires import Wires


@dataclass(frozen=True, slots=True)
class Plan:
    """A group of `size` workers that run one payload; `port` is 0 where any free one will do."""

    payload: Payload
    size: int
    surroundings: Surroundings
    run: str
    port: int = 0
    max_restarts: int = 0
    # how many ranks are threads of one process
    per_process: int = 1
    through_xla: bool = False

    def mates(self, rank: int) -> range:
        """The ranks of a rank's process, itself among them."""
        first = rank - rank % self.per_process
        return range(first, min(first + self.per_process, self.size))

    def orders(self, wires: Sequence[Wires], meeting: socket.socket, attempt: int) -> list[list[Order]]:
        """What each process's ranks are told, in the order of ranks; `meeting` is the bound socket of the store."""
        port = meeting.getsockname()[1]
        orders = [
            Order(
                seat=Seat(rank, self.size, port, self.run, attempt, self.max_restarts, self.per_process),
                surroundings=self.surroundings,
                descriptors=replace(
                    ends.far,
                    payload=self.payload.descriptor,
                    store=meeting.fileno() if rank == 0 else -1,
                    more=self.payload.more,
                ),
                through_xla=self.through_xla,
            )
            for rank, ends in enumerate(wires)
        ]
        return [orders[first : first + self.per_process] for first in range(0, self.size, self.per_process)]


def meeting_place(port: int) -> socket.socket:
    """A socket that listens on loopback before any worker starts, so that no port can be lost to somebody else."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((LOOPBACK, port))
        sock.listen(4096)
    except OSError as error:
        sock.close()
        raise LaunchError(
            f"use_port={port} was asked for, but that port can't be had on this machine: {error.strerror}. "
            "Leave use_port out: any free port is found."
        ) from None
    return sock
