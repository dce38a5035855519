"""The transfer of tensors to other processes: with the check of a call, or by collectives of the process group after it."""

import functools
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from accelerate_nb.runtime.operations.call_check import CallCheck, CollectiveCall, as_bytes
from accelerate_nb.runtime.world.world import World

# Larger ones have a collective each; smaller ones of one type share one.
_LARGEST_SHARED = 1 << 20
# No backend adds up all types of numbers; gloo stops at these.
_REDUCED_LOCALLY = (torch.bool, torch.int16, torch.complex64, torch.complex128)

_COMBINE: MappingProxyType[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {"sum": torch.add, "mean": torch.add, "max": torch.maximum, "min": torch.minimum}
)
_OPERATIONS = MappingProxyType({"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN})


def combined(reduction: str, rows: Iterable[Tensor]) -> Tensor:
    """The sum of the rows, as for a "mean" too, or the largest or smallest of them."""
    return functools.reduce(_COMBINE[reduction], rows)


# Each is a collective over one row of numbers: made ready while the calls are compared, then begun by `start`, which returns what to
# wait for; `rows` are of (processes or 1, length) when it is done, and `values` makes the result of them.


class _Gather:
    """Everyone gets what everyone has."""

    def __init__(self, world: World, row: Tensor, of_rows: Callable[[Tensor], Tensor]) -> None:
        self.group, self.row, self.values = world.group, row, of_rows
        self.rows = row.new_empty((world.size, len(row)))

    def start(self) -> Any:
        return self.group._allgather_base(as_bytes(self.rows), as_bytes(self.row))


class _Reduce:
    """The backend adds up on the way."""

    def __init__(self, world: World, row: Tensor, reduction: str) -> None:
        self.group, self.operation = world.group, _OPERATIONS.get(reduction, dist.ReduceOp.SUM)
        self.rows = row.clone()[None]

    def start(self) -> Any:
        return self.group.allreduce(self.rows, self.operation)

    def values(self, rows: Tensor) -> Tensor:
        return rows[0]


class _Broadcast:
    """One process's row replaces what the others have room for."""

    def __init__(self, world: World, row: Tensor, source: int) -> None:
        self.group, self.source, self.is_source = world.group, source, world.rank == source
        self.rows = row[None] if self.is_source else torch.empty_like(row)[None]

    def start(self) -> Any:
        work = self.group.broadcast(as_bytes(self.rows), self.source)
        if self.is_source:
            # the source's result is a copy, too, which is made while its own tensor is on its way
            self.rows = self.rows.clone()
        return work

    def values(self, rows: Tensor) -> Tensor:
        return rows[0]


_RowTransfer: TypeAlias = _Gather | _Reduce | _Broadcast


@dataclass(eq=False)
class TensorMover:
    """Tensors that torch.distributed can move from where they are, once all processes have agreed that they make the same call."""

    # The methods of process groups are called, rather than the functions of `torch.distributed`, which cost 30 to 60 µs a call on
    # top: for checks that the one of the call makes needless.
    world: World

    def gather(self, call: CollectiveCall, leaves: list[Tensor]) -> list[Tensor]:
        """Every process's tensors, joined along dimension 0."""
        return self._moved(
            call, leaves, lambda rows: _joined(torch.stack(rows)), lambda row: _Gather(self.world, row, _joined)
        )

    def reduce(self, call: CollectiveCall, leaves: list[Tensor], reduction: str, scale: float) -> list[Tensor]:
        """The reduction of every process's tensors, "mean" among them being a sum still."""

        def transfer(row: Tensor) -> _RowTransfer:
            if row.dtype in _REDUCED_LOCALLY:
                return _Gather(self.world, row, lambda rows: combined(reduction, rows))
            return _Reduce(self.world, row, reduction)

        return self._moved(call, leaves, lambda rows: combined(reduction, rows), transfer)

    def broadcast(self, call: CollectiveCall, leaves: list[Tensor], source: int) -> list[Tensor]:
        """One process's tensors."""

        def transfer(row: Tensor) -> _RowTransfer:
            return _Broadcast(self.world, row, source)

        return self._moved(call, leaves, lambda rows: rows[source].clone(), transfer, source)

    def send(self, leaf: Tensor | None, source: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor that one process has, when that process, and the tensor's shape and type, are known."""
        device = self.world.device
        sent = torch.empty(shape, dtype=dtype, device=device) if leaf is None else leaf.to(device)
        transfer = _Broadcast(self.world, _row([sent]), source)
        if sent.numel():
            transfer.start().wait()
        return transfer.rows.view(shape)

    def packed(self, value: Any) -> bytes:
        """An object as another process can unpickle it."""
        return pickle.dumps(value)

    def _moved(
        self,
        call: CollectiveCall,
        leaves: list[Tensor],
        inside: Callable[[list[Tensor]], Tensor],
        transfer: Callable[[Tensor], _RowTransfer],
        source: int | None = None,
    ) -> list[Tensor]:
        """The result for each tensor: `inside` of the check's rows where they hold it, else that of a collective after the check."""
        # what is on a device travels from there: the host is not to wait for it
        check = CallCheck(self.world, call, leaves, is_inside=self.world.device.type == "cpu", source=source)
        outside = [index for index in range(len(leaves)) if not check.carries(index)]
        if not outside:
            check.finish()
            return [inside(check.received(index)) for index in range(len(leaves))]
        shared = _shared(outside, leaves)
        transfers = [transfer(_row([leaves[index] for index in indices])) for indices in shared]
        check.finish()
        results = {index: inside(check.received(index)) for index in range(len(leaves)) if index not in outside}
        for work in [item.start() for item in transfers if item.rows.numel()]:
            work.wait()
        for indices, item in zip(shared, transfers, strict=True):
            parts = item.rows.split([leaves[index].numel() for index in indices], dim=1)
            for index, part in zip(indices, parts, strict=True):
                # results that shared one memory would all be kept, and saved, with each of them
                alone = part if len(parts) == 1 else part.clone(memory_format=torch.contiguous_format)
                results[index] = item.values(alone.view(len(alone), *leaves[index].shape))
        return [results[index] for index in range(len(leaves))]


def _shared(indices: Sequence[int], leaves: Sequence[Tensor]) -> list[list[int]]:
    """The tensors that travel together: those of one type that are not large."""
    shared: dict[Any, list[int]] = {}
    for index in indices:
        leaf = leaves[index]
        shared.setdefault(leaf.dtype if leaf.nbytes <= _LARGEST_SHARED else index, []).append(index)
    return list(shared.values())


def _row(leaves: Sequence[Tensor]) -> Tensor:
    """The numbers of tensors of one type, in one row."""
    rows = [leaf.detach().resolve_conj().resolve_neg().contiguous().view(-1) for leaf in leaves]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _joined(rows: Tensor) -> Tensor:
    return rows if rows.ndim == 1 else rows.flatten(0, 1)
