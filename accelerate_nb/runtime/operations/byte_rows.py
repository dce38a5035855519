"""The transfer of rows of bytes and of large tensors, in the way that is fastest on the processes' connection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accelerate_nb.runtime.operations.bruck_exchange import exchange_of
from accelerate_nb.runtime.world.world import World

# What a process group's own methods return. They are called here, rather than the functions of `torch.distributed`, which cost
# 30 to 60 µs a call on top: for checks and logs that the check before every operation makes needless.
Work = Any

_LARGEST_OVER_SOCKETS = 4 << 20


class RowExchange:
    """Any backend: one all-gather, which nccl and its kin write straight into the result."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.group: Any = world.group
        assert self.group is not None, "processes that are several are connected"

    def gathers_to_reduce(self, length: int) -> bool:
        """Whether tensors of so many bytes are faster gathered, and added up by each process, than added up on their way."""
        return False

    def fill(self, rows: Tensor) -> list[Work]:
        """Have the rows of all arrive, around this process's one, which is in `rows` already: what to wait for."""
        return [self.group._allgather_base(rows.view(-1), rows[self.world.rank])]

    def swap(self, sent: Tensor, received: Tensor) -> None:
        """Receive the bytes of the other of two processes, and send it as many, where `gathers_to_reduce` says so."""
        exchange_of(self.world).swap(sent, received)

    def add_up(self, tensor: Tensor, operation: Any) -> Work:
        """Have the sum, or what else the operation is, replace a tensor: what to wait for."""
        return self.group.allreduce(tensor, operation)

    def send(self, row: Tensor, source: int) -> list[Work]:
        """Have one process's row written over those of the others: what to wait for."""
        return [self.group.broadcast(row, source)]


class GlooRowExchange(RowExchange):
    """
    Processes on CPUs, and the hosts of XLA devices.

    Gloo's all-gather goes round a ring and copies everything twice. One broadcast from each process copies nothing (0.7 instead
    of 1.3 ms for 1 MB). Within a machine, rows that are not very large are faster over sockets, in the thread that calls.
    """

    def gathers_to_reduce(self, length: int) -> bool:
        return self._goes_over_sockets(length * self.world.size)

    def fill(self, rows: Tensor) -> list[Work]:
        if self._goes_over_sockets(rows.nbytes):
            exchange_of(self.world).fill(rows)
            return []
        return [self.group.broadcast(row, rank) for rank, row in enumerate(rows.unbind())]

    def send(self, row: Tensor, source: int) -> list[Work]:
        if self._goes_over_sockets(row.nbytes):
            exchange_of(self.world).broadcast(row, source)
            return []
        return super().send(row, source)

    def _goes_over_sockets(self, length: int) -> bool:
        return length <= _LARGEST_OVER_SOCKETS and exchange_of(self.world).is_on_one_machine


def row_exchange_of(world: World) -> RowExchange:
    """The exchange that suits the connection of these processes."""
    exchange_world = world.exchange_world
    over_gloo = exchange_world.device.type == "cpu" and exchange_world.backend in {"gloo", "xla"}
    return GlooRowExchange(exchange_world) if over_gloo else RowExchange(exchange_world)


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor's memory as a flat row of bytes, which every backend can move whatever the numbers are."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
