"""The transfer of tensors to other processes: as rows of bytes, or added up on their way."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from accelerate_nb.runtime.operations.byte_rows import RowExchange, Work, as_bytes, row_exchange_of
from accelerate_nb.runtime.operations.call_check import LARGEST, CallCheck, CollectiveCall
from accelerate_nb.runtime.world.world import World

# How many bytes travel inside the frame. What is longer is faster added up on its way, and sent by the one who has it.
_LARGEST_REDUCED = 256 << 10
_LARGEST_SENT = 64 << 10


class TensorMover:
    """
    Tensors that torch.distributed can move from where they are.

    Each of the three gives the new tensors, in their order, once all processes have agreed that they make the same call.
    """

    def __init__(self, world: World) -> None:
        self.world = world

    def gather(self, call: CollectiveCall, leaves: list[Tensor]) -> list[Tensor]:
        """Every process's tensors, joined along dimension 0."""
        return self._moved(call, leaves, _copied_and_joined, partial(_GatherTransfer, _joined), LARGEST)

    def reduce(self, call: CollectiveCall, leaves: list[Tensor], reduction: str, scale: float) -> list[Tensor]:
        """The reduction of every process's tensors, "mean" among them being a sum still."""
        return self._moved(call, leaves, OF_ROWS[reduction], partial(_reducing, reduction), _LARGEST_REDUCED)

    def broadcast(self, call: CollectiveCall, leaves: list[Tensor], source: int) -> list[Tensor]:
        """One process's tensors."""
        return self._moved(
            call, leaves, lambda rows: rows[source].clone(), partial(_BroadcastTransfer, source), _LARGEST_SENT
        )

    def send(self, leaf: Tensor | None, source: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor that one process has, when that process, and the tensor's shape and type, are known."""
        device = self.world.device
        local = torch.empty(shape, dtype=dtype, device=device) if leaf is None else leaf.to(device)
        sent = _BroadcastTransfer(source, row_exchange_of(self.world), local)
        for work in sent.start():
            work.wait()
        return sent.result()

    def packed(self, value: Any) -> bytes:
        """An object as another process can unpickle it."""
        return pickle.dumps(value)

    def _moved(
        self,
        call: CollectiveCall,
        leaves: list[Tensor],
        of_rows: Callable[[Tensor], Tensor],
        transfer: Callable[[RowExchange, Tensor], Transfer],
        largest: int,
    ) -> list[Tensor]:
        """
        The result of an operation for each tensor: `of_rows` of what every process sent, `(processes, *shape)`, where the frames
        hold it, and otherwise the result of a separate transfer.
        """
        exchange = CallCheck(self.world, call, leaves, largest)
        transfers = [
            None if inside else transfer(exchange.exchange, leaf)
            for leaf, inside in zip(leaves, exchange.carries, strict=True)
        ]
        exchange.finish()
        for work in [work for item in transfers if item is not None for work in item.start()]:
            work.wait()
        return [
            of_rows(exchange.rows(index)) if item is None else item.result() for index, item in enumerate(transfers)
        ]


def _joined(rows: Tensor) -> Tensor:
    return rows if rows.ndim == 1 else rows.flatten(0, 1)


def _copied_and_joined(rows: Tensor) -> Tensor:
    return _joined(rows.clone(memory_format=torch.contiguous_format))


OF_ROWS: MappingProxyType[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "sum": lambda rows: rows.sum(0, dtype=rows.dtype),
        "mean": lambda rows: rows.sum(0, dtype=rows.dtype),
        "max": lambda rows: rows.amax(0),
        "min": lambda rows: rows.amin(0),
    }
)


class _GatherTransfer:
    """Everyone gets what everyone has."""

    def __init__(self, of_rows: Callable[[Tensor], Tensor], exchange: RowExchange, leaf: Tensor) -> None:
        self.of_rows, self.exchange = of_rows, exchange
        self.rows = torch.empty((exchange.world.size, *leaf.shape), dtype=leaf.dtype, device=leaf.device)
        self.rows[exchange.world.rank] = leaf.detach()

    def start(self) -> list[Work]:
        return self.exchange.fill(as_bytes(self.rows).view(self.exchange.world.size, -1))

    def result(self) -> Tensor:
        return self.of_rows(self.rows)


class _ReduceTransfer:
    """The backend adds up on the way."""

    operations = MappingProxyType({"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN})

    def __init__(self, reduction: str, exchange: RowExchange, leaf: Tensor) -> None:
        self.exchange = exchange
        self.operation = self.operations.get(reduction, dist.ReduceOp.SUM)
        self.reduced = leaf.detach().clone(memory_format=torch.contiguous_format)

    def start(self) -> list[Work]:
        return [self.exchange.add_up(self.reduced, self.operation)]

    def result(self) -> Tensor:
        return self.reduced


# No backend adds up all types of numbers; gloo stops at these.
_REDUCED_LOCALLY = (torch.bool, torch.int16, torch.complex64, torch.complex128)


def _reducing(reduction: str, exchange: RowExchange, leaf: Tensor) -> Transfer:
    if leaf.dtype in _REDUCED_LOCALLY or leaf.numel() * leaf.element_size() <= exchange.largest_local_reduction:
        return _GatherTransfer(OF_ROWS[reduction], exchange, leaf)
    return _ReduceTransfer(reduction, exchange, leaf)


class _BroadcastTransfer:
    """One process's tensor replaces the others' copies."""

    def __init__(self, source: int, exchange: RowExchange, leaf: Tensor) -> None:
        self.source, self.exchange = source, exchange
        self.copy = torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
        if exchange.world.rank == source:
            self.copy.copy_(leaf.detach())

    def start(self) -> list[Work]:
        return self.exchange.send(as_bytes(self.copy), self.source)

    def result(self) -> Tensor:
        return self.copy


# The transfer of one large tensor: made ready while it isn't known yet whether the others make the same call, then begun by
# `start`, which returns what to wait for.
Transfer: TypeAlias = _GatherTransfer | _ReduceTransfer | _BroadcastTransfer
