"""The check before processes move data: which call each of them makes, and how much it sends."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import torch
from torch import Tensor

from accelerate_nb.errors import OperationError
from accelerate_nb.runtime.operations.bruck_exchange import exchange_of
from accelerate_nb.runtime.operations.peer_messages import HEAD
from accelerate_nb.runtime.world.world import World

# Every operation begins with one small row from each process, whose head names the call, so calls that don't fit together are
# an error that names them, on every process, where they would hang, end the process from inside gloo, or return what was in
# memory before. No call goes without it, with or without ACCELERATE_DEBUG_MODE, because a process can't know that another one's
# shapes have changed: a check that one process leaves out on its tenth call would match the check that another one makes.
#
# It costs little instead. What is small travels behind the head, so the check is no collective of its own. What is large follows
# when the heads agree, and is made ready (copied, its memory allocated) while they are under way. Rows are messages between the
# processes' hosts, so no device is waited for, and within a machine they take less time than the smallest of gloo's collectives.

_ALIGNED = 16


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """A collective call as one process makes it; all processes have to make the same."""

    operation: str
    arguments: str

    def __str__(self) -> str:
        return f"{self.operation}({self.arguments})"

    @property
    def signature(self) -> bytes:
        """16 bytes that are equal for equal calls, on every machine."""
        return _signature(self.operation, self.arguments)


@lru_cache(maxsize=1024)
def _signature(operation: str, arguments: str) -> bytes:
    return blake2b(f"{operation}\n{arguments}".encode(), digest_size=16).digest()


_MISFIT = CollectiveCall("the error", "of calls that don't fit together")


class CallCheck:
    """
    One call that is being agreed on: its row is sent at once, with as much of the payload as fits.

    With a `limit` equal calls have payloads of equal lengths, and parts of up to so many bytes travel inside; with a `source`,
    those of that process alone. Without a limit, lengths may differ, and rows have room for what was sent lately. `carries`
    marks what travels inside; `finish` waits for the others' rows.
    """

    def __init__(
        self,
        world: World,
        call: CollectiveCall,
        payload: Sequence[Tensor] = (),
        limit: int | None = None,
        source: int | None = None,
    ) -> None:
        self.world, self.call, self.payload = world, call, payload
        self.exchange = exchange = exchange_of(world)
        if exchange.unfinished is not None:
            with suppress(OperationError):
                exchange.unfinished.finish()  # an interrupt came while it waited: the others have gone on
        lengths = [aligned(part.nbytes) for part in payload]
        self._is_ragged = limit is None and bool(payload)
        room = exchange.recent_length if self._is_ragged else exchange.longest(source)
        self._offsets, end = _offsets(lengths, room, room if limit is None else limit)
        self.carries = [offset is not None for offset in self._offsets]
        exchange.open(room if self._is_ragged else end)
        for offset, part in zip(self._offsets, payload, strict=True):
            if offset is not None and source in (None, world.rank):
                exchange.rows(offset, part)[0].copy_(part.detach())
        self._calls: list[str] = []
        exchange.unfinished = self
        exchange.send(call.signature + struct.pack("<qq", sum(lengths), 0), source)

    def finish(self) -> None:
        """Wait until every process has called this; `OperationError`, on all of them, if their calls differ."""
        if self.exchange.unfinished is self:
            agrees = self.exchange.receive()
            self.exchange.unfinished = None
            self._calls = [] if agrees else _gather_texts(self.world, str(self.call))
            self.lengths = self.exchange.lengths() if agrees and self._is_ragged else []
        if self._calls:
            raise _misfit(self.world, self.call, self._calls)

    def gathered(self, index: int) -> Tensor:
        """All processes' values of a part that travelled inside, in their order: a new tensor of `(processes, *shape)`."""
        return self._rows(index).roll(self.world.rank, 0)

    def received(self, index: int) -> Tensor:
        """The source's value of a part that travelled inside: a view, until the next exchange."""
        return self._rows(index)[self.exchange.source_row]

    def _rows(self, index: int) -> Tensor:
        offset = self._offsets[index]
        assert offset is not None, "only what a row carries can be read from it"
        return self.exchange.rows(offset, self.payload[index])

    def gathered_parts(self) -> list[Tensor] | None:
        """Every process's only part, each aligned to 16 bytes; `None` if one of them did not fit."""
        if HEAD + max(self.lengths) > self.exchange.stride:
            return None
        return [self.exchange.row(rank)[HEAD : HEAD + length] for rank, length in enumerate(self.lengths)]


def agree(world: World, call: CollectiveCall) -> None:
    """Check that all processes make the same call; `OperationError`, on every one of them, if they don't."""
    CallCheck(world, call).finish()


def _offsets(lengths: Sequence[int], room: int, limit: int) -> tuple[list[int | None], int]:
    """The offset of each part of a payload in a row, `None` for one that doesn't fit or is longer than the limit; the row's end."""
    offsets: list[int | None] = []
    end = HEAD
    for length in lengths:
        fits = length <= limit and end + length <= room
        offsets.append(end if fits else None)
        end += length if fits else 0
    return offsets, end


def aligned(length: int) -> int:
    """The length of so many bytes with padding: what follows them begins where any type of number may."""
    return -(-length // _ALIGNED) * _ALIGNED


def places(parts: Sequence[Tensor]) -> tuple[list[int], int]:
    """The offset of each part of a payload of bytes, and the length of the whole: every type of number needs its alignment."""
    offsets, end = [], 0
    for part in parts:
        offsets.append(end)
        end += aligned(part.numel())
    return offsets, end


def exchange_rows(world: World, call: CollectiveCall, row: Tensor) -> list[Tensor]:
    """Every process's row of bytes, of whatever length each is, with up to 15 bytes after its end."""
    check = CallCheck(world, call, [row])
    check.finish()
    if (inside := check.gathered_parts()) is not None:
        return inside
    rows = [torch.zeros(length, dtype=torch.uint8, device="cpu") for length in check.lengths]
    rows[world.rank][: row.numel()] = row
    gloo = check.exchange.group()
    for work in [gloo.broadcast(row, rank) for rank, row in enumerate(rows) if row.numel()]:
        work.wait()
    return rows


def _gather_texts(world: World, text: str) -> list[str]:
    """The text of every process."""
    encoded = text.encode()
    row = torch.frombuffer(bytearray(struct.pack("<q", len(encoded)) + encoded), dtype=torch.uint8)
    rows = [row.numpy().tobytes() for row in exchange_rows(world, _MISFIT, row)]
    return [row[8 : 8 + struct.unpack_from("<q", row)[0]].decode() for row in rows]


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
