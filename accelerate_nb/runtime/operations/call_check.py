"""What processes tell each other before they move data: which call each of them is at, with how much to send."""

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
from accelerate_nb.own import Own
from accelerate_nb.runtime.operations.wire import Frames, Wire, Work, wire_of
from accelerate_nb.runtime.world import World

# Every operation begins with one frame from each process. All frames of an exchange have one size, whatever the call, so calls
# that don't fit together still meet and are an error that names them, on every process, where they would hang, end the process
# from inside gloo, or return what was in memory before. No call goes without it, with or without ACCELERATE_DEBUG_MODE, because
# a process can't know that another one's shapes have changed: a check that one process leaves out on its tenth call would meet
# the check that another one makes.
#
# It costs little instead. What is small travels inside the frame, so the check is no collective of its own, and frames grow
# with what was sent in the last exchanges, which all processes know alike. What is larger than any frame follows when the
# frames agree, and is made ready (copied, its room allocated) while they are under way. What remains is one round of frames for
# large reductions, and for broadcasts, whose sender would not wait for anyone without it.

_HEAD = 32
_ALIGNED = 16
# How large frames are. Between two processes on gloo one of 16 KB takes as long as one of 64 bytes, 64 KB a third longer.
_PAGE = 4096
_SMALLEST, LARGEST = 4 * _PAGE, 257 * _PAGE
_REMEMBERED = 8


class Room:
    """
    The frames of a process group: as large as what was sent in the last exchanges, whose memory is used again.

    All processes have read the same frames, so all come to the same size.
    """

    def __init__(self) -> None:
        self._wanted = deque([_SMALLEST], maxlen=_REMEMBERED)
        self._frames: Frames | None = None
        self._unread = False

    def frames(self, wire: Wire) -> Frames:
        """Frames of the size that all processes take for the next exchange."""
        if self._unread:
            self.read()  # an interrupt came while these were on their way: the others have read theirs
        size = max(self._wanted)
        if self._frames is None or self._frames.length != size:
            self._frames = wire.frames(size)
        return self._frames

    def send(self, wire: Wire) -> None:
        """Begin an exchange with what was written into the frame."""
        assert self._frames is not None, "frames are written before they are sent"
        self._unread = True
        self._frames.swap(wire)

    def read(self) -> bytes:
        """What every process said in the exchange, when it has come."""
        assert self._frames is not None, "frames are sent before they are read"
        heads = self._frames.heads(_HEAD)
        wanted = -(-(_HEAD + max(_lengths(heads))) // _PAGE) * _PAGE
        self._wanted.append(max(_SMALLEST, wanted) if wanted <= LARGEST else _SMALLEST)
        self._unread = False
        return heads


# by group, not by world: whoever looks for the world again finds the same group, and the others may not have looked
_rooms: Own[WeakKeyDictionary[Any, Room]] = Own(WeakKeyDictionary)


def _lengths(heads: bytes) -> list[int]:
    return [struct.unpack_from("<q", heads, start + 16)[0] for start in range(0, len(heads), _HEAD)]


@dataclass(frozen=True, slots=True)
class Call:
    """A collective call as one process makes it; all processes have to make the same."""

    operation: str
    what: str

    def __str__(self) -> str:
        return f"{self.operation}({self.what})"

    @property
    def signature(self) -> bytes:
        """16 bytes that are equal for equal calls, on every machine."""
        return _signature(self.operation, self.what)


@lru_cache(maxsize=1024)
def _signature(operation: str, what: str) -> bytes:
    return blake2b(f"{operation}\n{what}".encode(), digest_size=16).digest()


class Exchange:
    """
    One call that is being agreed on: its frame is on its way from the beginning, with as much of the payload as has room.

    Parts of more than `largest` bytes don't travel inside. `carries` says which parts travel inside; `finish` waits for the others' frames.
    """

    def __init__(self, world: World, call: Call, payload: Sequence[Tensor] = (), largest: int = LARGEST) -> None:
        self.world, self.call, self.payload = world, call, payload
        self.wire = wire_of(world)
        self._room = _rooms.get().setdefault(self.wire.group, Room())
        self._frames = self._room.frames(self.wire)
        lengths = [aligned(part.numel() * part.element_size()) for part in payload]
        self._spots = _spots([length if length <= largest else LARGEST for length in lengths], self._frames.length)
        self.carries = [spot is not None for spot in self._spots]
        self.lengths = [sum(length for length in lengths if length <= largest)] * world.size
        self._head = call.signature + struct.pack("<qq", self.lengths[0], 0)
        self._frames.say(0, self._head)
        for spot, part in zip(self._spots, payload, strict=True):
            if spot is not None:
                self._frames.put(spot, part)
        self._room.send(self.wire)

    def finish(self) -> None:
        """Wait until every process has come here; `OperationError`, on all of them, if their calls differ."""
        heads = self._room.read()
        if heads == self._head * self.world.size:
            return
        if any(heads[start : start + 16] != self._head[:16] for start in range(0, len(heads), _HEAD)):
            raise _misfit(self.wire, self.call)
        self.lengths = _lengths(heads)

    def rows(self, index: int) -> Tensor:
        """What every process sent in place of a part that travelled inside: a view of `(processes, *shape)`, until the next exchange."""
        spot = self._spots[index]
        assert spot is not None, "only what a frame carries can be read from it"
        return self._frames.rows(spot, self.payload[index])

    def everyones(self) -> list[Tensor] | None:
        """Every process's only part, each aligned to 16 bytes; `None` if one of them had no room."""
        if _HEAD + max(self.lengths) > self._frames.length:
            return None
        return [self._frames.row(rank, _HEAD, length) for rank, length in enumerate(self.lengths)]


def agree(world: World, call: Call) -> None:
    """All processes are at the same call; `OperationError`, on every one of them, if they are not."""
    Exchange(world, call).finish()


def _spots(lengths: Sequence[int], size: int) -> list[int | None]:
    """Where in a frame each part of a payload begins; `None` for one that has no room left."""
    spots: list[int | None] = []
    end = _HEAD
    for length in lengths:
        fits = end + length <= size
        spots.append(end if fits else None)
        end += length if fits else 0
    return spots


def aligned(length: int) -> int:
    """How much room so many bytes take, where what follows them begins where any type of number may."""
    return -(-length // _ALIGNED) * _ALIGNED


def places(parts: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where each part of a payload of bytes begins, and how long the whole is: every type of number needs its alignment."""
    spots, end = [], 0
    for part in parts:
        spots.append(end)
        end += aligned(part.numel())
    return spots, end


def exchange_rows(world: World, call: Call, row: Tensor) -> list[Tensor]:
    """Every process's row of bytes, of whatever length each is, with up to 15 bytes after its end."""
    exchange = Exchange(world, call, [row])
    exchange.finish()
    if (inside := exchange.everyones()) is not None:
        return inside
    everyones = torch.zeros((world.size, max(exchange.lengths)), dtype=torch.uint8, device=exchange.wire.world.device)
    everyones[world.rank, : row.numel()] = row
    _wait_for(exchange.wire.fill(everyones))
    return [mine[:length] for mine, length in zip(everyones, exchange.lengths, strict=True)]


def _wait_for(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()


def _misfit(wire: Wire, call: Call) -> OperationError:
    """What is to be raised: a function that raised what it has a name for would keep the caller's tensors, in a circle."""
    calls = _everyones_words(wire, str(call))
    each = "\n".join(f"  rank {rank}: {said}" for rank, said in enumerate(calls))
    error = OperationError(
        f"The processes made calls that don't fit together, at {call.operation} on rank {wire.world.rank}:\n{each}\n"
        "All of them have to make the same calls in the same order, with tensors of the same shapes and types; "
        "`pad_across_processes` makes shapes equal."
    )
    error.calls = tuple(calls)
    return error


def _everyones_words(wire: Wire, mine: str) -> list[str]:
    """What every process has to say."""
    told = mine.encode()
    lengths = torch.zeros((wire.world.size, 1), dtype=torch.int64, device=wire.world.device)
    lengths[wire.world.rank] = len(told)
    _wait_for(wire.fill(lengths))
    rows = torch.zeros((wire.world.size, int(lengths.max())), dtype=torch.uint8, device=wire.world.device)
    rows[wire.world.rank, : len(told)] = torch.frombuffer(bytearray(told), dtype=torch.uint8)
    _wait_for(wire.fill(rows))
    return [
        bytes(row[:length].tolist()).decode()
        for row, length in zip(rows.cpu(), lengths.flatten().tolist(), strict=True)
    ]
