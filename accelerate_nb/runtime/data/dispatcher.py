"""A loader that only the main process reads: each batch is sent to all processes, which take their parts of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from itertools import chain, islice
from typing import Any

from torch.utils.data import IterDataPipe, MapDataPipe

from accelerate_nb.errors import DataError, OperationError
from accelerate_nb.runtime.data.batch_transfer import BatchMessage, BatchTransfer
from accelerate_nb.runtime.data.batch_tree import cut, joined, size_of
from accelerate_nb.runtime.data.index_source import IndexSource
from accelerate_nb.runtime.data.prepared_loader import PreparedLoader
from accelerate_nb.runtime.data.sharding import LastStep, drawn_from, drawn_seed, in_rounds, processes_of_copy
from accelerate_nb.runtime.operations.nested import placed
from accelerate_nb.runtime.world.registry import current_world
from accelerate_nb.runtime.world.world import World
from accelerate_nb.user_warnings import warn_user


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
        self._processes_of_copy = processes_of_copy(torch_device_mesh)
        self._last_step: LastStep | None = None

    def _index_source(self) -> IndexSource | None:
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
        with drawn_from(begun):
            messages = self._messages(world)
            first = next(messages, None)
            filling = None  # samples that can fill up the last batch
            if first is not None and world.size > 1:
                parts = self._replica(world)[1]
                filling = self._slice(first.batch, slice(0, parts), size_of(first.batch), world)
            # what is skipped is read, since the last batch may need samples of the first
            waiting = _after(first, messages, skip)
        for message in waiting:
            self._course.batches += 1
            share = self._share(message, filling, world)
            if world.exchange_world is world:
                yield share
            else:  # it came to the host and was cut there
                yield placed(share, world.device, self._non_blocking) if self.send is None else self.send(share)

    @property
    def last_step(self) -> LastStep | None:
        return self._last_step

    @property
    def leads(self) -> bool:
        return current_world().is_main

    def _share(self, message: BatchMessage, filling: Any, world: World) -> Any:
        """This process's part of a batch."""
        batch = message.batch
        index, parts = self._replica(world)
        if parts == 1 and self.slice_fn is None:
            return self._all_of(message)
        observed = size_of(batch)
        size, left = divmod(observed, parts)
        if message.is_last:
            self._ends()
            self.remainder = observed
        if left and message.is_last and not self._drop_last:
            size += 1
            rounds = -(-(size * parts - observed) // size_of(filling))
            batch = joined([batch, *[filling] * rounds])
        elif left:
            warn_user(
                f"{left} of {observed} samples in a dispatched batch were left out, since they don't divide among "
                f"{parts} processes. Use batches whose size is a multiple of that."
            )
        if message.is_last and size > 0:
            dealt = size * parts
            self._last_step = LastStep(min(observed, dealt), dealt)
        part = slice(index * size, (index + 1) * size)
        return self._slice(batch, part, size_of(batch), world)

    def _all_of(self, message: BatchMessage) -> Any:
        """The batch as it is, where it is the only part: what can't be cut need not be."""
        if message.is_last:
            self._ends()
            with suppress(DataError):
                self.remainder = size_of(message.batch)
                self._last_step = LastStep(self.remainder, self.remainder)
        return message.batch

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
            if message.is_last:
                return

    def _sent(self, transfer: BatchTransfer, world: World) -> Iterator[BatchMessage | None]:
        messages = self._read(world)
        while True:
            check = transfer.start_check()  # the others' checks come in while this process reads
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
            drawn_seed()  # torch's loader draws one for its workers on the main process: generators stay in step
        while True:
            transfer.start_check().finish()
            yield transfer.receive()

    def _read(self, world: World) -> Iterator[BatchMessage]:
        """The main process's batches where they are sent from, each with whether it is the last."""
        for batch, is_last in self._ahead(self._joined(self._begun(), world)):
            yield BatchMessage(placed(batch, world.exchange_world.device, self._non_blocking), is_last)

    def _joined(self, batches: Iterator[Any], world: World) -> Iterator[Any]:
        """The batches of each step as one, of which all but the last can be cut into equal parts."""
        parts = self._replica(world)[1]
        size = 1 if self.split_batches else parts
        rounds = (round_ for round_ in in_rounds(batches, size) if len(round_) == size or not self._drop_last)
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


def _after(first: BatchMessage | None, others: Iterator[BatchMessage], skip: int) -> Iterator[BatchMessage]:
    if first is None:
        return iter(())
    if skip == 0:
        return chain([first], others)
    for _ in islice(others, skip - 1):
        pass
    return others


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
