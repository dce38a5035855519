"""A loader that only the main process reads: each batch is sent to all processes, which take their parts of it."""

import math
import pickle
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from enum import IntEnum
from io import BytesIO
from itertools import chain, islice
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import IterDataPipe, MapDataPipe

from accelerate_nb.errors import DataError, OperationError
from accelerate_nb.runtime.data import sharding
from accelerate_nb.runtime.data.prepared_loader import PreparedLoader
from accelerate_nb.runtime.operations.nested import is_namedtuple, leaves_of, mapped, placed, with_leaves
from accelerate_nb.runtime.operations.transfer import CallCheck, CollectiveCall, as_bytes
from accelerate_nb.runtime.world.registry import current_world
from accelerate_nb.runtime.world.world import World
from accelerate_nb.user_warnings import warn_user


def is_column(data: Any) -> bool:
    """Whether it is a list or a tuple of one thing a sample: nothing in it is a tensor."""
    if not isinstance(data, (list, tuple)) or is_namedtuple(data):
        return False
    return not any(isinstance(leaf, Tensor) for leaf in leaves_of(data, records=True))


def is_at_hand(batch: Any) -> bool:
    """Whether a batch is tensors in the host's memory, and no more: on a CPU there is nothing to move."""
    batch_type = type(batch)
    if batch_type is Tensor:
        return bool(batch.is_cpu)
    item = batch.values() if batch_type is dict else batch if batch_type in (list, tuple) else ()
    return bool(item) and all(type(entry) is Tensor and entry.is_cpu for entry in item)


def size_of(batch: Any) -> int:
    """The number of samples: the rows of the first tensor, or the things of the first column where there is none."""
    if isinstance(batch, (list, tuple)) and batch and isinstance(batch[0], Tensor) and batch[0].ndim > 0:
        return int(batch[0].shape[0])  # as most batches are
    leaves = leaves_of(batch, is_column, records=True)
    rows = [leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim > 0]
    columns = [len(leaf) for leaf in leaves if is_column(leaf)]
    for size in rows or columns:
        return int(size)
    raise DataError(
        f"A batch is to be cut into one part for each process, but a {type(batch).__name__} without tensors of at least one "
        "dimension, or lists, has no separate samples. Pass dispatch_batches=False."
    )


def cut(batch: Any, part: slice, size: int) -> Any:
    """The batch's samples in `part`, of `size` ones; what is not a row a sample stays as it is."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if leaf.ndim > 0 and leaf.shape[0] != size:
                raise DataError(
                    f"A batch of {size} samples is to be cut into one part for each process, but holds a tensor of shape "
                    f"{tuple(leaf.shape)}. Give it one row a sample, pass slice_fn_for_dispatch, or pass dispatch_batches=False."
                )
            return leaf[part] if leaf.ndim > 0 else leaf
        return leaf[part] if is_column(leaf) and len(leaf) == size else leaf

    return mapped(of_leaf, batch, is_column, records=True)


def joined(batches: list[Any]) -> Any:
    """One batch of the samples of several; what is not a row a sample has to be the same in all of them."""
    if len(batches) == 1:
        return batches[0]
    rows = [leaves_of(batch, is_column, records=True) for batch in batches]
    if len({len(leaves) for leaves in rows}) != 1:
        raise DataError(
            f"Batches that hold {', '.join(str(len(leaves)) for leaves in rows)} things can't be joined. "
            "Make batches of one structure, or pass dispatch_batches=False."
        )
    leaves = map(_joined_leaf, zip(*rows, strict=True))
    return with_leaves(batches[0], leaves, is_column, records=True)


def _joined_leaf(leaves: tuple[Any, ...]) -> Any:
    first = leaves[0]
    if isinstance(first, Tensor) and first.ndim > 0:
        return torch.cat(leaves)
    if is_column(first):
        return type(first)([item for leaf in leaves for item in leaf])
    if isinstance(first, Tensor):
        are_same = all(isinstance(leaf, Tensor) and torch.equal(first, leaf) for leaf in leaves[1:])
    else:
        are_same = all(type(leaf) is type(first) and bool(leaf == first) for leaf in leaves[1:])
    if are_same:
        return first
    raise DataError(
        f"Batches can't be joined: one holds a {type(first).__name__} that is not the same in all, and no row a sample. "
        "Leave it out of the batches, or pass dispatch_batches=False."
    )


_HEAD = 32
_NEXT = CollectiveCall("next", "a loader whose batches the main process dispatches")


class BatchMessageType(IntEnum):
    """The type of a message."""

    SAME = 0  # a batch of the structure that the last one had, inside the frame
    NEW = 1  # a batch of another structure: a second row follows
    END = 2  # nothing: the data are at their end
    FAILED = 3  # why the main process could not read on: a second row follows


# A batch for all processes, and whether it is the last.
BatchMessage: TypeAlias = tuple[Any, bool]


class BatchTransfer:
    """Sends one epoch's batches from the main process to all."""

    # Each message is one broadcast, of a frame that is as large as the last batch was: most have the shape of the one before.
    # Only a batch of another structure needs a second one.

    def __init__(self, world: World) -> None:
        self.world = world
        # of a device that takes part in no broadcast the rows stay at home, and each tensor is brought there
        self._sending_world = world.exchange_world
        self._structure = b""
        self._buffers = 0

    def send(self, message: BatchMessage | None) -> None:
        """Send a batch, or with `None` the end of the epoch; called by the main process."""
        if message is None:
            self._send_frame(BatchMessageType.END)
            return
        batch, is_last = message
        try:
            pickler = _TensorPickler()
            pickler.dump(batch)
            structure, parts = pickler.file.getvalue(), [as_bytes(tensor) for tensor in pickler.tensors]
        except Exception as error:
            self.fail(error)
            raise
        if structure == self._structure:
            self._send_frame(BatchMessageType.SAME, is_last, parts)
            return
        encoded = torch.frombuffer(bytearray(structure), dtype=torch.uint8)
        self._send_frame(BatchMessageType.NEW, is_last, second=(encoded.numel(), _places([encoded, *parts])[1]))
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
            return _TensorUnpickler(self._structure, frame[_HEAD:]).load(), bool(is_last)
        if message_type == BatchMessageType.END:
            return None
        second = torch.empty(length, dtype=torch.uint8, device=self._sending_world.device)
        self._broadcast(second)
        encoded_bytes = bytes(second[:encoded_length].cpu().numpy().tobytes())
        if message_type == BatchMessageType.FAILED:
            raise OperationError(f"The main process could not read the next batch: {encoded_bytes.decode()}")
        row = second[_aligned(encoded_length) :]
        self._structure, self._buffers = encoded_bytes, row.numel()
        return _TensorUnpickler(self._structure, row).load(), bool(is_last)

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

    def __init__(self) -> None:
        self.file, self.tensors = BytesIO(), list[Tensor]()
        super().__init__(self.file, pickle.HIGHEST_PROTOCOL)

    def persistent_id(self, obj: Any) -> tuple[tuple[int, ...], torch.dtype] | None:
        if not isinstance(obj, Tensor):
            return None
        self.tensors.append(obj)
        return tuple(obj.shape), obj.dtype


class _TensorUnpickler(pickle.Unpickler):
    """Reads what was written down, with tensors made of a row of bytes, in the order in which they were kept."""

    def __init__(self, structure: bytes, row: Tensor) -> None:
        super().__init__(BytesIO(structure))
        self._row, self._start = row, 0

    def persistent_load(self, pid: tuple[tuple[int, ...], torch.dtype]) -> Tensor:
        shape, dtype = pid
        part = self._row[self._start : self._start + prod(shape) * dtype.itemsize]
        self._start += _aligned(part.numel())
        return part.view(dtype).view(shape)


class DataLoaderDispatcher(PreparedLoader):
    """
    A loader that only the main process reads.

    One batch, with `split_batches`, or as many as there are processes are joined, sent to all, and cut into equal parts by
    `slice_fn`. Where the last doesn't divide, samples of the first fill it up, unless `_drop_last`. Processes that have one copy
    of the model together, by the world's mesh or by `torch_device_mesh`, count as one: they take the same part.
    """

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, skip_batches, use_stateful_dataloader, _drop_last, _non_blocking, iteration, **kwargs)
        self.split_batches = split_batches
        self.slice_fn = slice_fn
        self._processes_of_copy = sharding.processes_of_copy(torch_device_mesh)
        self._last_step: sharding.LastStep | None = None

    def _index_source(self) -> sharding.IndexSource | None:
        return None  # whether a batch is the last shows when several are joined

    @property
    def stride(self) -> int:
        return 1 if self.split_batches else self._replica(current_world())[1]

    def _replica(self, world: World) -> tuple[int, int]:
        """The index of this process's part of a batch, and the number of different parts."""
        if self._processes_of_copy > 1:
            return world.rank // self._processes_of_copy, world.size // self._processes_of_copy
        return world.mesh.data_replica(world.rank, *self.more_axes)

    def __len__(self) -> int:
        steps = super(PreparedLoader, self).__len__() / self.stride
        return max(0, (math.floor(steps) if self._drop_last else math.ceil(steps)) - self.skip_batches)

    @property
    def total_batch_size(self) -> int:
        """The number of samples that all processes together take in a step."""
        return self.step_size or self.stride

    @property
    def step_size(self) -> int | None:
        size = self.batch_size if self.batch_sampler is None else getattr(self.batch_sampler, "batch_size", None)
        return None if size is None else int(size) * self.stride

    def _batches(self, skip: int, begun: Mapping[str, Any]) -> Generator[Any, None, None]:
        world = current_world()
        self._last_step = None
        with sharding.drawn_from(begun):
            messages = self._messages(world)
            first = list(islice(messages, 1))
            filling = None  # samples that can fill up the last batch
            parts = self._replica(world)[1]
            if first and parts > 1:
                batch = first[0][0]
                filling = self._slice(batch, slice(0, parts), size_of(batch), world)
            waiting = chain(first, messages)
            # what is skipped is read, since the last batch may need samples of the first
            for _ in islice(waiting, skip):
                pass
        for batch, is_last in waiting:
            self._course.batches += 1
            share = self._share(batch, filling, world, is_last=is_last)
            if world.exchange_world is world:
                yield share
            else:  # it came to the host and was cut there
                yield placed(share, world.device, self._non_blocking) if self.send is None else self.send(share)

    @property
    def last_step(self) -> sharding.LastStep | None:
        return self._last_step

    @property
    def leads(self) -> bool:
        return current_world().is_main

    def _share(self, batch: Any, filling: Any, world: World, *, is_last: bool) -> Any:
        """This process's part of a batch."""
        index, parts = self._replica(world)
        if is_last:
            self._ends()
        if parts == 1 and self.slice_fn is None:
            # it is the only part: what can't be cut need not be
            with suppress(DataError):
                if is_last:
                    self.remainder = size_of(batch)
                    self._last_step = sharding.LastStep(self.remainder, self.remainder)
            return batch
        observed = size_of(batch)
        size, left = divmod(observed, parts)
        if is_last:
            self.remainder = observed
        if left and is_last and not self._drop_last:
            size += 1
            rounds = -(-(size * parts - observed) // size_of(filling))
            batch = joined([batch, *[filling] * rounds])
        elif left:
            warn_user(
                f"{left} of {observed} samples in a dispatched batch were left out, since they don't divide among "
                f"{parts} processes. Use batches whose size is a multiple of that."
            )
        if is_last and size > 0:
            dealt = size * parts
            self._last_step = sharding.LastStep(min(observed, dealt), dealt)
        part = slice(index * size, (index + 1) * size)
        return self._slice(batch, part, size_of(batch), world)

    def _slice(self, batch: Any, part: slice, size: int, world: World) -> Any:
        if self.slice_fn is None:
            return cut(batch, part, size)
        index, parts = self._replica(world)
        return self.slice_fn(batch, part, process_index=index, num_processes=parts)

    def _messages(self, world: World) -> Iterator[BatchMessage]:
        """Every batch for all processes, on every process."""
        if world.size == 1:
            yield from self._read(world)
            return
        transfer = BatchTransfer(world)
        for message in self._sent(transfer, world) if world.is_main else self._received(transfer):
            if message is None:
                return
            yield message
            if message[1]:
                return

    def _sent(self, transfer: BatchTransfer, world: World) -> Iterator[BatchMessage | None]:
        messages = self._read(world)
        while True:
            # it reports that this process reads, and waits for the others: one that left the loader alone, or makes a call of its own
            # inside of it, would leave them waiting for ever; their checks come in while this process reads
            check = CallCheck(world, _NEXT)
            try:
                message = next(messages, None)
            except Exception as error:
                check.finish()
                transfer.fail(error)
                raise
            check.finish()
            transfer.send(message)
            yield message

    def _received(self, transfer: BatchTransfer) -> Iterator[BatchMessage | None]:
        if isinstance(self.dataset, (IterDataPipe, MapDataPipe)):
            super(PreparedLoader, self).__iter__()  # data pipes agree on a seed when iteration begins
        elif self._course.is_first or not self.persistent_workers:
            sharding.drawn_seed()  # torch's loader draws one for its workers on the main process: generators stay in step
        while True:
            CallCheck(transfer.world, _NEXT).finish()
            yield transfer.receive()

    def _read(self, world: World) -> Iterator[BatchMessage]:
        """The main process's batches where they are sent from, each with whether it is the last."""
        for batch, is_last in self._ahead(self._joined(self._begun(), world)):
            yield placed(batch, world.exchange_world.device, self._non_blocking), is_last

    def _joined(self, batches: Iterator[Any], world: World) -> Iterator[Any]:
        """The batches of each step as one, of which all but the last can be cut into equal parts."""
        parts = self._replica(world)[1]
        size = 1 if self.split_batches else parts
        rounds = (round_ for round_ in sharding.in_rounds(batches, size) if len(round_) == size or not self._drop_last)
        joined_rounds = map(_concatenated, rounds)
        return joined_rounds if parts == 1 or self.slice_fn is not None else self._divisible(joined_rounds, parts)

    def _divisible(self, batches: Iterator[Any], parts: int) -> Iterator[Any]:
        """The batches, of which one that does not divide, as the last one of a loader's worker may be, waits for rows of the next one."""
        held: Any = None
        for batch in batches:
            size = size_of(batch)
            if held is None and size % parts == 0:
                yield batch
                continue
            waited = 0 if held is None else size_of(held)
            count, whole = waited + size, batch if held is None else _concatenated([held, batch])
            # no step has more rows than a full one, or than what was read at a time
            given = 0 if held is None else min(count, max(self.step_size or 0, waited, size))
            given -= given % parts
            if given > 0:
                yield cut(whole, slice(0, given), count)
            held = None if given == count else cut(whole, slice(given, count), count)
        if held is not None:
            yield held


def _concatenated(batches: list[Any]) -> Any:
    try:
        return joined(batches)
    except DataError:
        raise
    except RuntimeError as error:
        raise OperationError(
            "A loader whose batches the main process dispatches needs batches of one shape, but could not join "
            f"{len(batches)} of them ({error}). Pass dispatch_batches=False, so that each process fetches its own, or "
            "split_batches=True, so that each batch is cut into parts."
        ) from error
