"""The transfer of tensors to other processes: with a check of the call that each of them makes, or by collectives after it."""

import functools
import pickle
import struct
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from accelerate_nb.errors import OperationError
from accelerate_nb.runtime.world.world import World

# Every operation begins with one row of bytes from each process to all others. Its head names the call, so calls that don't fit
# together are an error that names them, on every process, where they would hang, end the process from inside gloo, or return what
# was in memory before. No call goes without it, with or without ACCELERATE_DEBUG_MODE, because a process can't know that another
# one's shapes have changed: a check that one process leaves out on its tenth call would match the check that another one makes.
#
# It costs little instead. Small data travel behind the head, so the check is no collective of its own. Large ones follow when the
# heads agree, and are made ready (copied, their memory allocated) while the rows are under way. Rows are messages between the
# processes' hosts, so no device is waited for.

# A row's head: the call's signature and the length of what follows; the data begin where any type of number may.
_HEAD = struct.Struct("<16sq8x")
_ALIGNED = 16
# The bytes that a process receives in one exchange, at most, where they are not fewer than so many of each other process.
_RECEIVED, _SHORTEST = 1 << 20, 4 << 10
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """A collective call as one process makes it; all processes have to make the same."""

    operation: str
    arguments: str

    def __str__(self) -> str:
        return f"{self.operation}({self.arguments})"


@lru_cache(maxsize=1024)
def _signature(operation: str, arguments: str) -> bytes:
    """16 bytes that are equal for equal calls, on every machine."""
    return blake2b(f"{operation}\n{arguments}".encode(), digest_size=16).digest()


class RowExchange:
    """The exchange of a row of bytes from each process, which all others receive in one step."""

    # Processes that make different calls send rows of different lengths. Gloo leaves alone what a message that is shorter than its
    # room doesn't fill; where its collectives expect equal lengths, a longer message ends the process.

    def __init__(self, world: World, group: Callable[[], Any]) -> None:
        self.rank, self.size, self.group = world.rank, world.size, group
        self.room = _HEAD.size + max(_RECEIVED // (self.size - 1) // _ALIGNED * _ALIGNED, _SHORTEST)
        # a tensor made in inference mode could not be written outside of it
        with torch.inference_mode(False):
            # the rows of the others in their order, then this process's
            self.rows = torch.empty((self.size, self.room), dtype=torch.uint8, device=_CPU)
        self.bytes = self.rows.numpy()
        others = [rank for rank in range(self.size) if rank != self.rank]
        self.order = [self.size - 1 if rank == self.rank else others.index(rank) for rank in range(self.size)]
        self.own, self._received = self.bytes[-1].data, self.rows[:-1].view(-1)
        self._rooms = [0 if rank == self.rank else self.room for rank in range(self.size)]
        # the check that was begun last and is not finished
        self.unfinished: CallCheck | None = None
        self._work: Any = None

    def start(self, call: CollectiveCall, length: int, end: int) -> None:
        """Send this process's row, whose data are written already, up to its `end`; `length` is that of all its data."""
        _HEAD.pack_into(self.own, 0, _signature(call.operation, call.arguments), length)
        sizes = [end] * self.size
        sizes[self.rank] = 0
        sent = self.rows[-1, :end]
        sent = sent if self.size == 2 else sent.repeat(self.size - 1)
        self._work = self.group().alltoall_base(self._received, sent, self._rooms, sizes, dist.AllToAllOptions())

    def finish(self) -> list[tuple[bytes, int]]:
        """Wait for the rows of all: the signature and the length in the head of each."""
        self._work.wait()
        return [_HEAD.unpack_from(self.bytes[place].data) for place in self.order]

    def values(self, offset: int, part: Tensor) -> Tensor:
        """What stands at an offset of each row, as tensors of a part's shape and type: a view of `(processes, *part.shape)`."""
        return self.rows.narrow(1, offset, part.nbytes).view(part.dtype).view(self.size, *part.shape)


class CallCheck:
    """One call that is being agreed on: its row is sent at once, with parts of the payload (none, or those of a `source` alone)."""

    def __init__(
        self,
        world: World,
        call: CollectiveCall,
        payload: Sequence[Tensor] = (),
        *,
        is_inside: bool = True,
        source: int | None = None,
    ) -> None:
        self.world, self.call = world, call
        self.exchange = exchange = exchange_of(world)
        if exchange.unfinished is not None:
            with suppress(OperationError):
                exchange.unfinished.finish()  # an interrupt came while it waited: the others have gone on
        sends, end = source in (None, world.rank), _HEAD.size
        # the rows' values of each part that travels inside
        self._values: list[Tensor | None] = []
        for part in payload:
            fits = is_inside and end + part.nbytes <= exchange.room
            values = exchange.values(end, part) if fits else None
            self._values.append(values)
            if values is not None:
                if sends:
                    values[-1].copy_(part.detach())
                end += -(-part.nbytes // _ALIGNED) * _ALIGNED
        self._calls: list[str] = []
        exchange.unfinished = self
        exchange.start(call, sum(part.nbytes for part in payload), end if sends else _HEAD.size)

    def finish(self) -> None:
        """Wait until every process has called this; `OperationError`, on all of them, if their calls differ."""
        if self.exchange.unfinished is self:
            heads = self.exchange.finish()
            self.exchange.unfinished = None
            self.lengths = [length for _, length in heads]
            if len({signature for signature, _ in heads}) > 1:
                self._calls = self._gather_texts()
        if self._calls:
            raise _misfit(self.world, self.call, self._calls)

    def carries(self, index: int) -> bool:
        """Whether this part of the payload travels inside of the rows."""
        return self._values[index] is not None

    def received(self, index: int) -> list[Tensor]:
        """All processes' values of a part that travelled inside, in their order: views, until the next check."""
        values = self._values[index]
        assert values is not None, "only what a row carries can be read from it"
        rows = values.unbind()
        return [rows[place] for place in self.exchange.order]

    def _gather_texts(self) -> list[str]:
        """The texts of the calls of all; every process has seen a difference, and sends its own."""
        exchange, text = self.exchange, str(self.call).encode()[: self.exchange.room - _HEAD.size]
        exchange.own[_HEAD.size : _HEAD.size + len(text)] = text
        exchange.start(self.call, len(text), _HEAD.size + len(text))
        lengths = [length for _, length in exchange.finish()]
        return [
            exchange.bytes[place, _HEAD.size : _HEAD.size + length].tobytes().decode(errors="ignore")
            for place, length in zip(exchange.order, lengths, strict=True)
        ]


def agree(world: World, call: CollectiveCall) -> None:
    """Check that all processes make the same call; `OperationError`, on every one of them, if they don't."""
    CallCheck(world, call).finish()


def exchange_rows(world: World, call: CollectiveCall, row: Tensor) -> list[Tensor]:
    """Every process's row of bytes, of whatever length each is: views, until the next check."""
    check = CallCheck(world, call, [row])
    check.finish()
    exchange, rows, works = check.exchange, [], []
    for rank, (place, length) in enumerate(zip(exchange.order, check.lengths, strict=True)):
        end = _HEAD.size + length
        if end <= exchange.room:
            rows.append(exchange.rows[place, _HEAD.size : end])
            continue
        rows.append(row if rank == world.rank else torch.empty(length, dtype=torch.uint8, device=_CPU))
        works.append(exchange.group().broadcast(rows[-1], rank))
    for work in works:
        work.wait()
    return rows


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor's memory as a flat row of bytes, which every backend can move whatever the numbers are."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _misfit(world: World, call: CollectiveCall, calls: Sequence[str]) -> OperationError:
    """The error to raise: a function that raised what it has a name for would keep the caller's tensors, in a circle."""
    item = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(calls))
    error = OperationError(
        f"The processes made calls that don't fit together, at {call.operation} on rank {world.rank}:\n{item}\n"
        "All of them have to make the same calls in the same order, with tensors of the same shapes and types; "
        "`pad_across_processes` makes shapes equal, and `gather_for_metrics(..., use_gather_object=True)` takes any."
    )
    error.calls = tuple(calls)
    return error


@cache
def _exchanges() -> WeakKeyDictionary[Any, RowExchange]:
    """By group, not by world: a process that discovers its world again finds the same group, unlike the others' worlds."""
    return WeakKeyDictionary()


def exchange_of(world: World) -> RowExchange:
    """The exchange among the hosts of these processes."""
    group = world.exchange_world.group
    exchanges = _exchanges()
    exchange = exchanges.get(group)
    if exchange is None:
        exchange = exchanges[group] = RowExchange(world, _gloo_of(group) or _beside(world))
    return exchange


def _gloo_of(group: Any) -> Callable[[], Any] | None:
    """The gloo group of these processes, where they have one."""
    if isinstance(group, dist.ProcessGroup) and "cpu:gloo" not in str(dist.get_backend_config(group)):
        return None
    # not kept: what is held here would not end where its connection is released
    reference = weakref.ref(group)

    def gloo() -> Any:
        group = reference()
        return group._get_backend(_CPU) if isinstance(group, dist.ProcessGroup) else group

    return gloo


def _beside(world: World) -> Callable[[], Any]:
    """A gloo group of the same processes: a check over their devices would have the hosts wait for what these compute."""
    timeout = world.group._get_backend(world.device).options._timeout
    # torch's stubs don't know its arguments
    gloo: Any = dist.ProcessGroupGloo
    # ranks along an axis of a mesh have a group of their own, and so have those along another
    store = dist.PrefixStore(f"accelerate_nb/calls/{world.group.group_name}", world.store)
    group = gloo(store, world.rank, world.size, timeout)
    return lambda: group


# ------------------------------------------------------------------------------------------------------------ transfers

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
