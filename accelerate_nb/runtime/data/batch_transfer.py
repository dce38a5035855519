"""How batches travel from the main process to the others: one row of bytes each, which the others know how to read."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from enum import IntEnum
from io import BytesIO
from math import prod
from typing import Any

import torch
from torch import Tensor

from accelerate_nb.errors import OperationError
from accelerate_nb.runtime.operations.exchange import Call, Exchange, aligned, places
from accelerate_nb.runtime.operations.wire import as_bytes, wire_of
from accelerate_nb.runtime.world import World

_HEAD = 32
_NEXT = Call("next", "a loader whose batches the main process dispatches")


class Kind(IntEnum):
    """What a parcel holds."""

    SAME = 0  # a batch of the structure that the last one had, inside the frame
    NEW = 1  # a batch of another structure: a second row follows
    END = 2  # nothing: the data are at their end
    FAILED = 3  # why the main process could not read on: a second row follows


@dataclass(frozen=True, slots=True)
class Parcel:
    """A batch for all processes, and whether it is the last."""

    batch: Any
    is_last: bool


class Post:
    """
    The way of one epoch's batches from the main process to all.

    Each parcel is one broadcast, of a frame that is as large as the last batch was: most batches look like the one before.
    Only a batch of another structure needs a second one.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        # of a device that takes part in no broadcast the rows stay at home, and each tensor is brought there
        self._wire = wire_of(world)
        self._structure = b""
        self._room = 0

    def ask(self) -> Exchange:
        """
        Say that this process asks for the next batch; `finish` waits for the others, and raises if one does something else.

        A process that left the loader alone, or makes a call of its own inside of it, would leave the others waiting for ever.
        """
        return Exchange(self.world, _NEXT)

    def send(self, parcel: Parcel | None) -> None:
        """Send a batch, or with `None` say that there is none; called by the main process."""
        if parcel is None:
            self._send_frame(Kind.END)
            return
        try:
            structure, tensors = taken_apart(parcel.batch)
            parts = [as_bytes(tensor) for tensor in tensors]
        except Exception as error:
            self.fail(error)
            raise
        if structure == self._structure:
            self._send_frame(Kind.SAME, parcel.is_last, parts)
            return
        told = torch.frombuffer(bytearray(structure), dtype=torch.uint8)
        self._send_frame(Kind.NEW, parcel.is_last, second=(told.numel(), places([told, *parts])[1]))
        self._broadcast(self._row([told, *parts]))
        self._structure, self._room = structure, places(parts)[1]

    def fail(self, error: Exception) -> None:
        """Tell the others why nothing will come; called by the main process."""
        text = torch.frombuffer(bytearray(f"{type(error).__name__}: {error}".encode()), dtype=torch.uint8)
        self._send_frame(Kind.FAILED, second=(text.numel(), text.numel()))
        self._broadcast(text.to(self._wire.world.device))

    def receive(self) -> Parcel | None:
        """What the main process sent; `OperationError` if it failed; called by the others."""
        frame = torch.empty(_HEAD + self._room, dtype=torch.uint8, device=self._wire.world.device)
        self._broadcast(frame)
        kind, is_last, told, length = frame[:_HEAD].cpu().view(torch.int64).tolist()
        if kind == Kind.SAME:
            return Parcel(self._opened(frame[_HEAD:]), bool(is_last))
        if kind == Kind.END:
            return None
        second = torch.empty(length, dtype=torch.uint8, device=self._wire.world.device)
        self._broadcast(second)
        told_bytes = bytes(second[:told].cpu().numpy().tobytes())
        if kind == Kind.FAILED:
            raise OperationError(f"The main process could not read the next batch: {told_bytes.decode()}")
        row = second[aligned(told) :]
        self._structure, self._room = told_bytes, row.numel()
        return Parcel(self._opened(row), bool(is_last))

    def _send_frame(
        self, kind: Kind, is_last: bool = False, parts: list[Tensor] | None = None, second: tuple[int, int] = (0, 0)
    ) -> None:
        head = torch.tensor([kind, is_last, *second], dtype=torch.int64).view(torch.uint8)
        frame = self._row([head, *(parts or [])])
        if frame.numel() < _HEAD + self._room:
            frame = torch.cat([frame, frame.new_zeros(_HEAD + self._room - frame.numel())])
        self._broadcast(frame)

    def _row(self, parts: list[Tensor]) -> Tensor:
        spots, length = places(parts)
        row = torch.empty(length, dtype=torch.uint8, device=self._wire.world.device)
        for spot, part in zip(spots, parts, strict=True):
            row[spot : spot + part.numel()] = part
        return row

    def _opened(self, row: Tensor) -> Any:
        return _Opener(self._structure, row).load()

    def _broadcast(self, row: Tensor) -> None:
        for work in self._wire.send(row, 0):
            work.wait()


def taken_apart(batch: Any) -> tuple[bytes, list[Tensor]]:
    """What a batch is without its tensors' numbers, and its tensors."""
    file = BytesIO()
    taker = _Taker(file, protocol=pickle.HIGHEST_PROTOCOL)
    taker.dump(batch)
    return file.getvalue(), taker.tensors


class _Taker(pickle.Pickler):
    """Writes down of a tensor what it is like, and keeps it; everything else is written whole."""

    def __init__(self, file: BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> tuple[tuple[int, ...], torch.dtype] | None:
        if not isinstance(obj, Tensor):
            return None
        self.tensors.append(obj)
        return tuple(obj.shape), obj.dtype


class _Opener(pickle.Unpickler):
    """Reads what was written down, with tensors made of a row of bytes, in the order in which they were kept."""

    def __init__(self, structure: bytes, row: Tensor) -> None:
        super().__init__(BytesIO(structure))
        self._row = row
        self._start = 0

    def persistent_load(self, pid: tuple[tuple[int, ...], torch.dtype]) -> Tensor:
        shape, dtype = pid
        part = self._row[self._start : self._start + prod(shape) * dtype.itemsize]
        self._start += aligned(part.numel())
        return part.view(dtype).view(shape)
