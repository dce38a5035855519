"""The transfer of batches from the main process to the others: one row of bytes each, which the others know how to read."""

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
from accelerate_nb.runtime.operations.call_check import CallCheck, CollectiveCall, as_bytes
from accelerate_nb.runtime.world.world import World

_HEAD = 32
_NEXT = CollectiveCall("next", "a loader whose batches the main process dispatches")


class BatchMessageType(IntEnum):
    """The type of a message."""

    SAME = 0  # a batch of the structure that the last one had, inside the frame
    NEW = 1  # a batch of another structure: a second row follows
    END = 2  # nothing: the data are at their end
    FAILED = 3  # why the main process could not read on: a second row follows


@dataclass(frozen=True, slots=True)
class BatchMessage:
    """A batch for all processes, and whether it is the last."""

    batch: Any
    is_last: bool


class BatchTransfer:
    """
    Sends one epoch's batches from the main process to all.

    Each message is one broadcast, of a frame that is as large as the last batch was: most have the shape of the one before.
    Only a batch of another structure needs a second one.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        # of a device that takes part in no broadcast the rows stay at home, and each tensor is brought there
        self._sending_world = world.exchange_world
        self._structure = b""
        self._buffers = 0

    def start_check(self) -> CallCheck:
        """
        Report that this process waits for the next batch; `finish` waits for the others, and raises if one does something else.

        A process that left the loader alone, or makes a call of its own inside of it, would leave the others waiting for ever.
        """
        return CallCheck(self.world, _NEXT)

    def send(self, message: BatchMessage | None) -> None:
        """Send a batch, or with `None` the end of the epoch; called by the main process."""
        if message is None:
            self._send_frame(BatchMessageType.END)
            return
        try:
            file = BytesIO()
            pickler = _TensorPickler(file, protocol=pickle.HIGHEST_PROTOCOL)
            pickler.dump(message.batch)
            structure, parts = file.getvalue(), [as_bytes(tensor) for tensor in pickler.tensors]
        except Exception as error:
            self.fail(error)
            raise
        if structure == self._structure:
            self._send_frame(BatchMessageType.SAME, message.is_last, parts)
            return
        encoded = torch.frombuffer(bytearray(structure), dtype=torch.uint8)
        self._send_frame(BatchMessageType.NEW, message.is_last, second=(encoded.numel(), _places([encoded, *parts])[1]))
        self._broadcast(self._row([encoded, *parts]))
        self._structure, self._buffers = structure, _places(parts)[1]

    def fail(self, error: Exception) -> None:
        """Send the others the reason why nothing will come; called by the main process."""
        text = torch.frombuffer(bytearray(f"{type(error).__name__}: {error}".encode()), dtype=torch.uint8)
        self._send_frame(BatchMessageType.FAILED, second=(text.numel(), text.numel()))
        self._broadcast(text.to(self._sending_world.device))

    def receive(self) -> BatchMessage | None:
        """The message of the main process; `OperationError` if it failed; called by the others."""
        frame = torch.empty(_HEAD + self._buffers, dtype=torch.uint8, device=self._sending_world.device)
        self._broadcast(frame)
        message_type, is_last, encoded_length, length = frame[:_HEAD].cpu().view(torch.int64).tolist()
        if message_type == BatchMessageType.SAME:
            return BatchMessage(self._opened(frame[_HEAD:]), bool(is_last))
        if message_type == BatchMessageType.END:
            return None
        second = torch.empty(length, dtype=torch.uint8, device=self._sending_world.device)
        self._broadcast(second)
        encoded_bytes = bytes(second[:encoded_length].cpu().numpy().tobytes())
        if message_type == BatchMessageType.FAILED:
            raise OperationError(f"The main process could not read the next batch: {encoded_bytes.decode()}")
        row = second[_aligned(encoded_length) :]
        self._structure, self._buffers = encoded_bytes, row.numel()
        return BatchMessage(self._opened(row), bool(is_last))

    def _send_frame(
        self,
        message_type: BatchMessageType,
        is_last: bool = False,
        parts: list[Tensor] | None = None,
        second: tuple[int, int] = (0, 0),
    ) -> None:
        head = torch.tensor([message_type, is_last, *second], dtype=torch.int64).view(torch.uint8)
        frame = self._row([head, *(parts or [])])
        if frame.numel() < _HEAD + self._buffers:
            frame = torch.cat([frame, frame.new_zeros(_HEAD + self._buffers - frame.numel())])
        self._broadcast(frame)

    def _row(self, parts: list[Tensor]) -> Tensor:
        offsets, length = _places(parts)
        row = torch.empty(length, dtype=torch.uint8, device=self._sending_world.device)
        for offset, part in zip(offsets, parts, strict=True):
            row[offset : offset + part.numel()] = part
        return row

    def _opened(self, row: Tensor) -> Any:
        return _TensorUnpickler(self._structure, row).load()

    def _broadcast(self, row: Tensor) -> None:
        self._sending_world.group.broadcast(row, 0).wait()


def _aligned(length: int) -> int:
    """The length of so many bytes with padding: what follows them begins where any type of number may."""
    return -(-length // 16) * 16


def _places(parts: list[Tensor]) -> tuple[list[int], int]:
    """The offset of each part of a row of bytes, and the row's length: every type of number needs its alignment."""
    offsets, end = [], 0
    for part in parts:
        offsets.append(end)
        end += _aligned(part.numel())
    return offsets, end


class _TensorPickler(pickle.Pickler):
    """Writes a tensor's shape and type, and keeps the tensor; everything else is written whole."""

    def __init__(self, file: BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> tuple[tuple[int, ...], torch.dtype] | None:
        if not isinstance(obj, Tensor):
            return None
        self.tensors.append(obj)
        return tuple(obj.shape), obj.dtype


class _TensorUnpickler(pickle.Unpickler):
    """Reads what was written down, with tensors made of a row of bytes, in the order in which they were kept."""

    def __init__(self, structure: bytes, row: Tensor) -> None:
        super().__init__(BytesIO(structure))
        self._row = row
        self._start = 0

    def persistent_load(self, pid: tuple[tuple[int, ...], torch.dtype]) -> Tensor:
        shape, dtype = pid
        part = self._row[self._start : self._start + prod(shape) * dtype.itemsize]
        self._start += _aligned(part.numel())
        return part.view(dtype).view(shape)
