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
from accelerate_nb.runtime.operations.call_check import CallCheck, CollectiveCall
from accelerate_nb.runtime.world.world import World

# Parts of up to so many bytes travel inside the check's rows. What is longer is faster received where it is to stay.
_LARGEST_INSIDE = 64 << 10


class TensorMover:
    """
    Tensors that torch.distributed can move from where they are.

    Each of the three gives the new tensors, in their order, once all processes have agreed that they make the same call.
    """

    def __init__(self, world: World) -> None:
        self.world = world

    def gather(self, call: CollectiveCall, leaves: list[Tensor]) -> list[Tensor]:
        """Every process's tensors, joined along dimension 0."""
        check = self._check(call, leaves)
        return _moved(check, lambda index: _joined(check.gathered(index)), partial(_GatherTransfer, _joined))

    def reduce(self, call: CollectiveCall, leaves: list[Tensor], reduction: str, scale: float) -> list[Tensor]:
        """The reduction of every process's tensors, "mean" among them being a sum still."""
        check = self._check(call, leaves)
        return _moved(check, lambda index: OF_ROWS[reduction](check.gathered(index)), partial(_reducing, reduction))

    def broadcast(self, call: CollectiveCall, leaves: list[Tensor], source: int) -> list[Tensor]:
        """One process's tensors."""
        check = self._check(call, leaves, source)
        return _moved(check, lambda index: check.received(index).clone(), partial(_BroadcastTransfer, source))

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

    def _check(self, call: CollectiveCall, leaves: list[Tensor], source: int | None = None) -> CallCheck:
        # what is on a device travels from there: the host is not to wait for it
        limit = _LARGEST_INSIDE if self.world.device.type == "cpu" else -1
        return CallCheck(self.world, call, leaves, limit, source)


def _moved(
    check: CallCheck,
    of_rows: Callable[[int], Tensor],
    transfer: Callable[[RowExchange, Tensor], Transfer],
) -> list[Tensor]:
    """The result for each tensor: `of_rows` where the check's rows hold it, and otherwise that of a separate transfer."""
    transfers = [
        None if inside else transfer(row_exchange_of(check.world), leaf)
        for leaf, inside in zip(check.payload, check.carries, strict=True)
    ]
    check.finish()
    begun = [(item, leaf) for item, leaf in zip(transfers, check.payload, strict=True) if item is not None]
    for work in [work for item, leaf in begun if leaf.numel() for work in item.start()]:
        work.wait()
    return [of_rows(index) if item is None else item.result() for index, item in enumerate(transfers)]


def _joined(rows: Tensor) -> Tensor:
    return rows if rows.ndim == 1 else rows.flatten(0, 1)


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


class _PairTransfer:
    """Each of two processes adds up what both have."""

    operations = MappingProxyType({"max": torch.maximum, "min": torch.minimum})

    def __init__(self, reduction: str, exchange: RowExchange, leaf: Tensor) -> None:
        self.exchange, self.leaf = exchange, leaf.detach().contiguous().resolve_conj().resolve_neg()
        self.operation = self.operations.get(reduction, torch.add)
        self.received = torch.empty_like(self.leaf)

    def start(self) -> list[Work]:
        self.exchange.swap(as_bytes(self.leaf), as_bytes(self.received))
        return []

    def result(self) -> Tensor:
        # in one order, so that both have the same signs of zeros
        pair = (self.leaf, self.received) if self.exchange.world.rank == 0 else (self.received, self.leaf)
        return self.operation(*pair, out=self.received)


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
    is_gathered = exchange.gathers_to_reduce(leaf.nbytes)
    if is_gathered and exchange.world.size == 2:
        return _PairTransfer(reduction, exchange, leaf)
    if is_gathered or leaf.dtype in _REDUCED_LOCALLY:
        return _GatherTransfer(OF_ROWS[reduction], exchange, leaf)
    return _ReduceTransfer(reduction, exchange, leaf)


class _BroadcastTransfer:
    """One process's tensor replaces what the others have room for."""

    def __init__(self, source: int, exchange: RowExchange, leaf: Tensor) -> None:
        self.source, self.exchange, self.leaf = source, exchange, leaf.detach()
        if exchange.world.rank == source:
            self.sent = self.leaf.contiguous().resolve_conj().resolve_neg()
        else:
            self.sent = torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)

    def start(self) -> list[Work]:
        works = self.exchange.send(as_bytes(self.sent), self.source)
        if self.sent is self.leaf:
            # the source's result is a copy, too, which is made while its own tensor is on its way
            self.sent = self.leaf.clone()
        return works

    def result(self) -> Tensor:
        return self.sent


# The transfer of one large tensor: made ready while it isn't known yet whether the others make the same call, then begun by
# `start`, which returns what to wait for.
Transfer: TypeAlias = _GatherTransfer | _PairTransfer | _ReduceTransfer | _BroadcastTransfer
