"""
What processes tell each other before they move data: which call each of them is at, with how much to send.

Every operation begins with one frame from each process. All frames have one size, whatever the call, so calls that don't fit
together still meet and are an error that names them, on every process, where they would hang, end the process from inside
gloo, or return what was in memory before. No call goes without it, with or without ACCELERATE_DEBUG_MODE, because a process
can't know that another one's shapes have changed: a check that is left out on the tenth call of one process meets a check
that another one makes. It costs little instead. What is small travels inside the frame, so the check is no collective of its
own; what is large follows when the frames agree, and is made ready (copied, its room allocated) while they are under way.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from accelerate_nb.errors import OperationError
from accelerate_nb.runtime.operations.wire import wire_of
from accelerate_nb.runtime.world import World

# Between two processes on gloo 16 KB take as long as 64 bytes (110 µs), 64 KB a third longer.
FRAME = 16384
_HEAD = 32
ROOM = FRAME - _HEAD
_ALIGNED = 16


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

    `carries` says which parts travel inside; `finish` waits for the others' frames.
    """

    def __init__(self, world: World, call: Call, payload: Sequence[Tensor] = ()) -> None:
        self.world, self.call, self.payload = world, call, payload
        self.wire = wire_of(world)
        lengths = [part.numel() * part.element_size() for part in payload]
        self._spots = _spots(lengths)
        self.carries = [spot is not None for spot in self._spots]
        self.lengths = [sum(lengths)] * world.size
        self._head = call.signature + struct.pack("<qq", self.lengths[0], 0)
        self._frames = self.wire.frames(FRAME)
        self._frames.say(0, self._head)
        for spot, part in zip(self._spots, payload, strict=True):
            if spot is not None:
                self._frames.put(spot, part)
        self._frames.swap()

    def finish(self) -> None:
        """Wait until every process has come here; `OperationError`, on all of them, if their calls differ."""
        heads = self._frames.heads(_HEAD)
        if heads == self._head * self.world.size:
            return
        said = [heads[start : start + _HEAD] for start in range(0, len(heads), _HEAD)]
        if any(one[:16] != self._head[:16] for one in said):
            _disagree(self.world, self.call)
        self.lengths = [struct.unpack_from("<q", one, 16)[0] for one in said]

    def rows(self, index: int) -> Tensor:
        """What every process sent in place of a part that travelled inside, as new memory: `(processes, *shape)`."""
        spot = self._spots[index]
        assert spot is not None, "only what a frame carries can be read from it"
        return self._frames.rows(spot, self.payload[index])

    def row(self, rank: int) -> Tensor:
        """All the bytes that one process's frame carried, as long as that process said."""
        return self._frames.row(rank, _HEAD, self.lengths[rank])


def agree(world: World, call: Call) -> None:
    """All processes are at the same call; `OperationError`, on every one of them, if they are not."""
    Exchange(world, call).finish()


def _spots(lengths: Sequence[int]) -> list[int | None]:
    """Where in the frame each part of a payload begins; `None` for one that has no room left."""
    spots: list[int | None] = []
    end = _HEAD
    for length in lengths:
        fits = end + length <= FRAME
        spots.append(end if fits else None)
        end += _aligned(length) if fits else 0
    return spots


def _aligned(length: int) -> int:
    return -(-length // _ALIGNED) * _ALIGNED


def places(parts: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where each part of a payload of bytes begins, and how long the whole is: every type of number needs its alignment."""
    spots, end = [], 0
    for part in parts:
        spots.append(end)
        end += _aligned(part.numel())
    return spots, end


def exchange_rows(world: World, call: Call, row: Tensor) -> list[Tensor]:
    """Every process's row of bytes, of whatever length each is."""
    exchange = Exchange(world, call, [row])
    exchange.finish()
    longest = max(exchange.lengths)
    if longest <= ROOM:
        return [exchange.row(rank) for rank in range(world.size)]
    everyones = torch.zeros((world.size, longest), dtype=torch.uint8, device=world.device)
    everyones[world.rank, : row.numel()] = row
    for work in exchange.wire.fill(everyones):
        work.wait()
    return [mine[:length] for mine, length in zip(everyones, exchange.lengths, strict=True)]


def _disagree(world: World, call: Call) -> NoReturn:
    calls: list[str | None] = [None] * world.size
    dist.all_gather_object(calls, str(call))
    each = "\n".join(f"  rank {rank}: {said}" for rank, said in enumerate(calls))
    raise OperationError(
        f"The processes made calls that don't fit together, at {call.operation} on rank {world.rank}:\n{each}\n"
        "All of them have to make the same calls in the same order, with tensors of the same shapes and types; "
        "`pad_across_processes` makes shapes equal."
    )
