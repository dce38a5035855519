"""The check before processes move data: which call each of them makes, and how much it sends."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from accelerate_nb.errors import OperationError
from accelerate_nb.rank_local import RankLocal
from accelerate_nb.runtime.operations.byte_rows import ByteRows, RowExchange, Work, row_exchange_of
from accelerate_nb.runtime.world.world import World

# Every operation begins with one frame from each process. All frames of an exchange have one size, whatever the call, so calls
# that don't fit together are an error that names them, on every process, where they would hang, end the process
# from inside gloo, or return what was in memory before. No call goes without it, with or without ACCELERATE_DEBUG_MODE, because
# a process can't know that another one's shapes have changed: a check that one process leaves out on its tenth call would match
# the check that another one makes.
#
# It costs little instead. What is small travels inside the frame, so the check is no collective of its own, and frames grow
# with what was sent in the last exchanges, which all processes know alike. What is larger than any frame follows when the
# frames agree, and is made ready (copied, its memory allocated) while they are under way. What remains is one round of frames for
# large reductions, and for broadcasts, whose sender would not wait for anyone without it.

_HEAD = 32
_ALIGNED = 16
# How large frames are. Between two processes on gloo one of 16 KB takes as long as one of 64 bytes, 64 KB a third longer.
_PAGE = 4096
_SMALLEST, LARGEST = 4 * _PAGE, 257 * _PAGE
_REMEMBERED = 8


class RowBuffers:
    """
    The frames of a process group: as large as what was sent in the last exchanges, whose memory is used again.

    All processes have read the same frames, so all come to the same size.
    """

    def __init__(self) -> None:
        self._wanted = deque([_SMALLEST], maxlen=_REMEMBERED)
        self._frames: ByteRows | None = None
        self._unread = False

    def frames(self, exchange: RowExchange) -> ByteRows:
        """Frames of the size that all processes take for the next exchange."""
        if self._unread:
            self.read()  # an interrupt came while these were on their way: the others have read theirs
        size = max(self._wanted)
        if self._frames is None or self._frames.length != size:
            self._frames = exchange.frames(size)
        return self._frames

    def send(self, exchange: RowExchange) -> None:
        """Begin an exchange with what was written into the frame."""
        assert self._frames is not None, "frames are written before they are sent"
        self._unread = True
        self._frames.swap(exchange)

    def read(self) -> bytes:
        """The heads that every process sent in the exchange, when they have come."""
        assert self._frames is not None, "frames are sent before they are read"
        heads = self._frames.heads(_HEAD)
        wanted = -(-(_HEAD + max(_lengths(heads))) // _PAGE) * _PAGE
        self._wanted.append(max(_SMALLEST, wanted) if wanted <= LARGEST else _SMALLEST)
        self._unread = False
        return heads


# by group, not by world: a process that discovers its world again finds the same group, unlike the others' worlds
_row_buffers: RankLocal[WeakKeyDictionary[Any, RowBuffers]] = RankLocal(WeakKeyDictionary)


def _lengths(heads: bytes) -> list[int]:
    return [struct.unpack_from("<q", heads, start + 16)[0] for start in range(0, len(heads), _HEAD)]


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


class CallCheck:
    """
    One call that is being agreed on: its frame is sent at once, with as much of the payload as fits.

    Parts of more than `largest` bytes don't travel inside. `carries` marks those that do; `finish` waits for the others' frames.
    """

    def __init__(
        self, world: World, call: CollectiveCall, payload: Sequence[Tensor] = (), largest: int = LARGEST
    ) -> None:
        self.world, self.call, self.payload = world, call, payload
        self.exchange = row_exchange_of(world)
        self._buffers = _row_buffers.get().setdefault(self.exchange.group, RowBuffers())
        self._frames = self._buffers.frames(self.exchange)
        lengths = [aligned(part.numel() * part.element_size()) for part in payload]
        self._offsets = _offsets([length if length <= largest else LARGEST for length in lengths], self._frames.length)
        self.carries = [offset is not None for offset in self._offsets]
        self.lengths = [sum(length for length in lengths if length <= largest)] * world.size
        self._head = call.signature + struct.pack("<qq", self.lengths[0], 0)
        self._frames.write(0, self._head)
        for offset, part in zip(self._offsets, payload, strict=True):
            if offset is not None:
                self._frames.put(offset, part)
        self._buffers.send(self.exchange)

    def finish(self) -> None:
        """Wait until every process has called this; `OperationError`, on all of them, if their calls differ."""
        heads = self._buffers.read()
        if heads == self._head * self.world.size:
            return
        if any(heads[start : start + 16] != self._head[:16] for start in range(0, len(heads), _HEAD)):
            raise _misfit(self.exchange, self.call)
        self.lengths = _lengths(heads)

    def rows(self, index: int) -> Tensor:
        """All processes' values of a part that travelled inside: a view of `(processes, *shape)`, until the next exchange."""
        offset = self._offsets[index]
        assert offset is not None, "only what a frame carries can be read from it"
        return self._frames.rows(offset, self.payload[index])

    def gathered_parts(self) -> list[Tensor] | None:
        """Every process's only part, each aligned to 16 bytes; `None` if one of them did not fit."""
        if _HEAD + max(self.lengths) > self._frames.length:
            return None
        return [self._frames.row(rank, _HEAD, length) for rank, length in enumerate(self.lengths)]


def agree(world: World, call: CollectiveCall) -> None:
    """Check that all processes make the same call; `OperationError`, on every one of them, if they don't."""
    CallCheck(world, call).finish()


def _offsets(lengths: Sequence[int], size: int) -> list[int | None]:
    """The offset of each part of a payload in a frame; `None` for one that doesn't fit."""
    offsets: list[int | None] = []
    end = _HEAD
    for length in lengths:
        fits = end + length <= size
        offsets.append(end if fits else None)
        end += length if fits else 0
    return offsets


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
    exchange = CallCheck(world, call, [row])
    exchange.finish()
    if (inside := exchange.gathered_parts()) is not None:
        return inside
    rows = torch.zeros((world.size, max(exchange.lengths)), dtype=torch.uint8, device=exchange.exchange.world.device)
    rows[world.rank, : row.numel()] = row
    _wait_for(exchange.exchange.fill(rows))
    return [part[:length] for part, length in zip(rows, exchange.lengths, strict=True)]


def _wait_for(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()


def _misfit(exchange: RowExchange, call: CollectiveCall) -> OperationError:
    """The error to raise: a function that raised what it has a name for would keep the caller's tensors, in a circle."""
    calls = _gather_texts(exchange, str(call))
    item = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(calls))
    error = OperationError(
        f"The processes made calls that don't fit together, at {call.operation} on rank {exchange.world.rank}:\n{item}\n"
        "All of them have to make the same calls in the same order, with tensors of the same shapes and types; "
        "`pad_across_processes` makes shapes equal."
    )
    error.calls = tuple(calls)
    return error


def _gather_texts(exchange: RowExchange, text: str) -> list[str]:
    """The text of every process."""
    encoded = text.encode()
    lengths = torch.zeros((exchange.world.size, 1), dtype=torch.int64, device=exchange.world.device)
    lengths[exchange.world.rank] = len(encoded)
    _wait_for(exchange.fill(lengths))
    rows = torch.zeros((exchange.world.size, int(lengths.max())), dtype=torch.uint8, device=exchange.world.device)
    rows[exchange.world.rank, : len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    _wait_for(exchange.fill(rows))
    return [
        bytes(row[:length].tolist()).decode()
        for row, length in zip(rows.cpu(), lengths.flatten().tolist(), strict=True)
    ]
