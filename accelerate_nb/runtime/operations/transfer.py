"""How tensors reach other processes: as rows of bytes, or added up on their way."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from accelerate_nb.runtime.operations.exchange import LARGEST, Call, Exchange
from accelerate_nb.runtime.operations.wire import Wire, Work, as_bytes, wire_of
from accelerate_nb.runtime.world import World

# How many bytes travel inside the frame. What is longer is faster added up on its way, and sent by the one who has it.
_LARGEST_REDUCED = 256 << 10
_LARGEST_SENT = 64 << 10


class Mover:
    """
    Tensors that torch.distributed can move from where they are.

    Each of the three gives the new tensors, in their order, once all processes have agreed that they make the same call.
    """

    def __init__(self, world: World) -> None:
        self.world = world

    def gather(self, call: Call, leaves: list[Tensor]) -> list[Tensor]:
        """Every process's tensors, joined along dimension 0."""
        return self._moved(call, leaves, _copied_and_joined, partial(_Rows, _joined), LARGEST)

    def reduce(self, call: Call, leaves: list[Tensor], reduction: str, scale: float) -> list[Tensor]:
        """What a reduction, "mean" among them being a sum still, makes of every process's tensors."""
        return self._moved(call, leaves, OF_ROWS[reduction], partial(_reducing, reduction), _LARGEST_REDUCED)

    def broadcast(self, call: Call, leaves: list[Tensor], source: int) -> list[Tensor]:
        """One process's tensors."""
        return self._moved(call, leaves, lambda rows: rows[source].clone(), partial(_Sent, source), _LARGEST_SENT)

    def send(self, leaf: Tensor | None, source: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor that one process has, when it is known which one and what it is like."""
        device = self.world.device
        mine = torch.empty(shape, dtype=dtype, device=device) if leaf is None else leaf.to(device)
        sent = _Sent(source, wire_of(self.world), mine)
        for work in sent.start():
            work.wait()
        return sent.result()

    def packed(self, thing: Any) -> bytes:
        """An object as another process can unpickle it."""
        return pickle.dumps(thing)

    def _moved(
        self,
        call: Call,
        leaves: list[Tensor],
        of_rows: Callable[[Tensor], Tensor],
        transfer: Callable[[Wire, Tensor], Transfer],
        largest: int,
    ) -> list[Tensor]:
        """
        What an operation makes of each tensor: `of_rows` of what every process sent, `(processes, *shape)`, where the frames
        had room for it, and otherwise what came by a transfer of its own.
        """
        exchange = Exchange(self.world, call, leaves, largest)
        transfers = [
            None if inside else transfer(exchange.wire, leaf)
            for leaf, inside in zip(leaves, exchange.carries, strict=True)
        ]
        exchange.finish()
        for work in [work for each in transfers if each is not None for work in each.start()]:
            work.wait()
        return [
            of_rows(exchange.rows(index)) if each is None else each.result() for index, each in enumerate(transfers)
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


class Transfer(Protocol):
    """The way of one large tensor: made ready while it isn't known yet whether the others make the same call."""

    def start(self) -> list[Work]:
        """Set off; what to wait for."""

    def result(self) -> Tensor:
        """What arrived."""


class _Rows:
    """Everyone gets what everyone has."""

    def __init__(self, of_rows: Callable[[Tensor], Tensor], wire: Wire, leaf: Tensor) -> None:
        self.of_rows, self.wire = of_rows, wire
        self.rows = torch.empty((wire.world.size, *leaf.shape), dtype=leaf.dtype, device=leaf.device)
        self.rows[wire.world.rank] = leaf.detach()

    def start(self) -> list[Work]:
        return self.wire.fill(as_bytes(self.rows).view(self.wire.world.size, -1))

    def result(self) -> Tensor:
        return self.of_rows(self.rows)


class _Reduced:
    """The backend adds up on the way."""

    operations = MappingProxyType({"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN})

    def __init__(self, reduction: str, wire: Wire, leaf: Tensor) -> None:
        self.wire = wire
        self.operation = self.operations.get(reduction, dist.ReduceOp.SUM)
        self.reduced = leaf.detach().clone(memory_format=torch.contiguous_format)

    def start(self) -> list[Work]:
        return [self.wire.add_up(self.reduced, self.operation)]

    def result(self) -> Tensor:
        return self.reduced


# No backend adds up all types of numbers; gloo stops at these.
_ADDED_UP_HERE = (torch.bool, torch.int16, torch.complex64, torch.complex128)


def _reducing(reduction: str, wire: Wire, leaf: Tensor) -> Transfer:
    if leaf.dtype in _ADDED_UP_HERE or leaf.numel() * leaf.element_size() <= wire.rows_reduced_here:
        return _Rows(OF_ROWS[reduction], wire, leaf)
    return _Reduced(reduction, wire, leaf)


class _Sent:
    """One process's tensor replaces the others' copies."""

    def __init__(self, source: int, wire: Wire, leaf: Tensor) -> None:
        self.source, self.wire = source, wire
        self.copy = torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
        if wire.world.rank == source:
            self.copy.copy_(leaf.detach())

    def start(self) -> list[Work]:
        return self.wire.send(as_bytes(self.copy), self.source)

    def result(self) -> Tensor:
        return self.copy
