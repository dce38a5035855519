"""What processes tell each other before they move data: which call each of them is at, with how much to send."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from accelerate_nb.errors import OperationError
from accelerate_nb.runtime.world import World

# Every exchange begins with one frame of this size from each process, whatever the call: so calls that don't fit together
# still meet, and are told apart, where they would hang or return what was in memory before. A collective over gloo takes as
# long for 4 KB as for 8 bytes, so what is small travels inside the frame, and the check costs no collective of its own.
FRAME = 4096
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
        return blake2b(f"{self.operation}\n{self.what}".encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Frames:
    """What came from all processes: `(processes, ROOM)` bytes on this process's device, of which each used some."""

    world: World
    room: Tensor
    lengths: tuple[int, ...]

    @property
    def complete(self) -> bool:
        """Whether everything was small enough to travel inside."""
        return max(self.lengths) <= ROOM


def exchange(world: World, call: Call, payload: Sequence[Tensor] = ()) -> Frames:
    """
    Agree on a call, and bring small payloads along: bytes, each part aligned as in `places`.

    `OperationError`, on every process, if the calls differ.
    """
    spots, length = places(payload)
    frame = torch.empty(FRAME, dtype=torch.uint8, device=world.device)
    head = call.signature + struct.pack("<qq", length, 0)
    frame[:_HEAD] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    if length <= ROOM:
        for spot, part in zip(spots, payload, strict=True):
            frame[_HEAD + spot : _HEAD + spot + part.numel()] = part
    everyones = torch.empty((world.size, FRAME), dtype=torch.uint8, device=world.device)
    dist.all_gather(list(everyones.unbind()), frame)
    heads = bytes(everyones[:, :_HEAD].cpu().numpy().tobytes())
    said = [heads[start : start + _HEAD] for start in range(0, len(heads), _HEAD)]
    if any(one[:16] != head[:16] for one in said):
        _disagree(world, call)
    lengths = tuple(struct.unpack_from("<q", one, 16)[0] for one in said)
    return Frames(world, everyones[:, _HEAD:], lengths)


def places(parts: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where each part of a payload begins, and how long the whole is: every type of number needs its alignment."""
    spots, end = [], 0
    for part in parts:
        spots.append(end)
        end += -(-part.numel() // _ALIGNED) * _ALIGNED
    return spots, end


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor's memory as a flat row of bytes, which every backend can move whatever the numbers are."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def exchange_rows(world: World, call: Call, row: Tensor) -> list[Tensor]:
    """Every process's row of bytes, of whatever length each is."""
    frames = exchange(world, call, [row])
    if frames.complete:
        return [mine[:row_length] for mine, row_length in zip(frames.room, frames.lengths, strict=True)]
    longest = max(frames.lengths)
    padded = torch.zeros(longest, dtype=torch.uint8, device=world.device)
    padded[: row.numel()] = row
    everyones = torch.empty((world.size, longest), dtype=torch.uint8, device=world.device)
    dist.all_gather(list(everyones.unbind()), padded)
    return [mine[:row_length] for mine, row_length in zip(everyones, frames.lengths, strict=True)]


def _disagree(world: World, call: Call) -> NoReturn:
    calls: list[str | None] = [None] * world.size
    dist.all_gather_object(calls, str(call))
    each = "\n".join(f"  rank {rank}: {said}" for rank, said in enumerate(calls))
    raise OperationError(
        f"The processes made calls that don't fit together, at {call.operation} on rank {world.rank}:\n{each}\n"
        "All of them have to make the same calls in the same order, with tensors of the same shapes and types; "
        "`pad_across_processes` makes shapes equal."
    )
