"""A loader whose every process reads its own share, and brings the next batch to the device ahead."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from concurrent.futures import Future
from contextlib import closing
from contextvars import copy_context
from functools import partial
from itertools import islice
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from accelerate_nb.errors import StateError
from accelerate_nb.runtime.compat.dataclasses import named
from accelerate_nb.runtime.data import sharding
from accelerate_nb.runtime.data.dispatcher import is_at_hand, is_column
from accelerate_nb.runtime.data.prepared_loader import PreparedLoader, length_of
from accelerate_nb.runtime.operations.nested import leaves_of, placed
from accelerate_nb.runtime.training.seed import synchronize_rng_states
from accelerate_nb.runtime.world.registry import current_world

_PLAIN = (str, bytes, int, float, bool, list, tuple, type(None))
# A device that no longer responds does not keep a loop from being left.
_LIMIT = 10.0
# The function that sends a batch, the batch, and where what it becomes is waited for.
_Job: TypeAlias = tuple[Callable[[Any], Any], Any, Future[Any]]


def one_copy_ahead(batches: Iterable[tuple[Any, bool]], copier: BatchCopier) -> Generator[tuple[Any, bool], None, None]:
    """The copied batches, each handed out once the copy of the next one has been set off."""
    reader = iter(batches)
    waiting = deque([_begun(reader, copier)])
    try:
        while waiting[0] is not None:
            if isinstance(waiting[0], Exception):
                raise waiting[0]
            waiting.append(_begun(reader, copier))
            pending, is_last = waiting.popleft()
            yield copier.finish(pending), is_last
    finally:
        copier.end()


def _begun(reader: Iterator[tuple[Any, bool]], copier: BatchCopier) -> Any:
    """The next batch, its copy set off, with whether it is the last; an error where it can't be had, `None` after the last."""
    try:
        for batch, is_last in reader:
            return copier.begin(batch), is_last
    except Exception as error:  # noqa: BLE001 - anybody's data set; raised when its turn comes
        return error
    return None


class SideStreamCopier:
    """Copies on a CUDA stream of its own; from memory that is not pinned (`pin_memory=True`) the copy does not overlap."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    def begin(self, batch: Any) -> tuple[Any, torch.cuda.Event | None]:
        """Set off the copy, unless the batch holds what may only be moved by the computation's own stream."""
        if not movable_ahead(batch):
            return batch, None
        with torch.cuda.stream(self.stream):
            moved = placed(batch, self.device, non_blocking=True)
        return moved, self.stream.record_event()

    def finish(self, pending: tuple[Any, torch.cuda.Event | None]) -> Any:
        """Make the current stream wait for the copy, which belongs to it from then on."""
        batch, copied = pending
        if copied is None:
            return placed(batch, self.device, non_blocking=True)
        compute_stream = torch.cuda.current_stream(self.device)
        compute_stream.wait_event(copied)
        for leaf in leaves_of(batch, records=True):
            if isinstance(leaf, Tensor):
                # the caching allocator would give the memory to the side stream's next copy while this stream still reads it:
                # https://docs.pytorch.org/docs/stable/generated/torch.Tensor.record_stream.html
                leaf.record_stream(compute_stream)
        return batch

    def end(self) -> None:
        """Nothing is kept."""


class BackgroundCopier:
    """Sends batches in a thread of its own, for a device whose transfers take the host's time."""

    # The thread reads nothing: data sets, collate functions and samplers draw from generators that belong to the whole process,
    # and which numbers they got would depend on where the loop happens to be at that moment.

    def __init__(self, send: Callable[[Any], Any]) -> None:
        self._send = send
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()  # never holds more than two: one copy ahead
        # only a rank's own context knows what is that rank's, where ranks are threads themselves
        run = copy_context().run
        # the thread knows the queue alone, so that a loop without references can end it
        self._thread = threading.Thread(target=run, args=(_work, self._jobs), name="accelerate-nb batches", daemon=True)
        self._thread.start()

    def begin(self, batch: Any) -> Any:
        """Have the batch sent, unless it holds what only its own code can move, which may expect the loop's thread."""
        if not movable_ahead(batch):
            return batch
        sent: Future[Any] = Future()
        self._jobs.put((self._send, batch, sent))
        return sent

    def finish(self, pending: Any) -> Any:
        """The batch, once it is sent; what went wrong there is raised here."""
        return pending.result() if isinstance(pending, Future) else self._send(pending)

    def end(self) -> None:
        """End the thread."""
        self._jobs.put(None)
        # garbage is collected in any thread, also in this one
        if threading.current_thread() is not self._thread:
            self._thread.join(_LIMIT)


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        send, batch, sent = job
        try:
            sent.set_result(send(batch))
        except BaseException as error:  # noqa: BLE001 - raised where the batch is read
            sent.set_exception(error)
        del job, send, batch, sent  # the next job may come late


def movable_ahead(batch: Any) -> bool:
    """Whether everything in the batch is known: plain tensors in the host's memory, and what isn't moved at all."""
    return all(
        leaf.device.type == "cpu" and leaf.layout == torch.strided and not leaf.is_nested
        if isinstance(leaf, Tensor)
        else isinstance(leaf, _PLAIN)
        for leaf in leaves_of(batch, is_column, records=True)
    )


# Copies a batch in two steps, `begin` and `finish`, between which others can run.
BatchCopier: TypeAlias = SideStreamCopier | BackgroundCopier


class BatchOfWorker(NamedTuple):
    """A batch as a worker process sends it that deals out samples, with the real part of a step that it filled up."""

    batch: Any
    step: sharding.LastStep | None


def _collated(collate: Callable[[Any], Any], dataset: Any, samples: Any) -> BatchOfWorker:
    return BatchOfWorker(collate(samples), dataset.last_step)


# Samplers of torch that draw from their generator alone, which is made equal on all ranks when an epoch begins.
_SYNCHRONIZED = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class DataLoaderShard(PreparedLoader):
    """A loader whose every process reads its own share, on its own device."""

    def __init__(
        self,
        dataset: Any,
        device: Any = None,
        rng_types: list[Any] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, skip_batches, use_stateful_dataloader, _drop_last, _non_blocking, iteration, **kwargs)
        self.device = device
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        # of batches that workers deal out: the real part of the current step, those read ahead, and how many samples were repeated
        self._step: sharding.LastStep | None = None
        self._steps: deque[sharding.LastStep | None] = deque()
        self._repeated = 0
        if self._dealt_by_workers:
            self.collate_fn = partial(_collated, self.collate_fn, self.dataset)

    def _synchronize(self, *, resumed: bool) -> None:
        wanted = [rng_type_ for rng_type_ in self.rng_types or () if not resumed or named(rng_type_) == "generator"]
        synchronize_rng_states(wanted, self.synchronized_generator)

    def _batches(self, skip: int, begun: Mapping[str, Any]) -> Generator[Any, None, None]:
        course = self._course
        if self._source is not None:
            self._source.order = begun.get("order")
            self._source.longest = self._longest_order()
        with sharding.drawn_from(begun):
            batches = self._read(skip)
        marked = self._ahead(batches) if self._source is None else self._counted(batches, self._source.current)
        self._step, self._repeated = None, 0
        self._steps.clear()
        if self._dealt_by_workers:
            marked = self._unpacked(marked)
        with closing(self._moved(marked)) as moved:
            for batch, is_last in moved:
                course.batches += 1
                if self._steps:
                    self._step = self._steps.popleft()
                    self._repeated += 0 if self._step is None else self._step.repeated
                if is_last:
                    self._ends()
                yield batch

    def _unpacked(self, marked: Iterator[tuple[Any, bool]]) -> Iterator[tuple[Any, bool]]:
        """The batches alone, where workers send more with them."""
        for item, is_last in marked:
            if isinstance(item, BatchOfWorker):
                self._steps.append(item.step)
                yield item.batch, is_last
            else:
                yield item, is_last

    def _longest_order(self) -> int | None:
        """The number of batches up to which an order is sent to all ranks; `None` where all have the same order."""
        if not self.is_shared or current_world().size == 1:
            return None
        source = sharding.index_source(self)
        order: Any = self.sampler if source is None else getattr(source, "batch_sampler", source)
        sampler: Any = order.sampler if type(order) is BatchSampler else order
        if type(sampler) in (SequentialSampler, sharding.SeedableRandomSampler):
            return None
        if type(sampler) in _SYNCHRONIZED and "generator" in map(named, self.rng_types or ()):
            return None  # its generator is the synchronised one
        length = length_of(order)
        # one that is longer than its length, or than the data where it has none, may have no end
        return 2 * ((length_of(self.dataset) or 0) if length is None else length)

    def _moved(self, marked: Iterator[tuple[Any, bool]]) -> Generator[tuple[Any, bool], None, None]:
        """The batches where they are to be."""
        if self.device is None:
            yield from marked
        elif (copier := self._copier(self.device)) is not None:
            yield from one_copy_ahead(marked, copier)
        else:
            stays = torch.device(self.device).type == "cpu"
            send = self.send or partial(placed, device=self.device, non_blocking=self._non_blocking)
            for batch, is_last in marked:
                yield batch if stays and is_at_hand(batch) else send(batch), is_last

    def send_in_background(self, send: Callable[[Any], Any], device: Any, between: Callable[[], None]) -> None:
        """From now on batches are read one ahead and sent to the device by a thread; `between` is done between them."""
        self.send, self.device, self.between, self._non_blocking = send, device, between, True

    def _copier(self, device: Any) -> BatchCopier | None:
        """The copier that runs beside the computation, where batches may be read before the current one is done with."""
        if self.send is None:
            is_beside = self._non_blocking and torch.device(device).type == "cuda"
            return SideStreamCopier(torch.device(device)) if is_beside else None
        # What workers read draws nothing in this process. What is read here may: read ahead of the loop, it would draw before
        # the loop does, and a checkpoint between the two would go on with other numbers. So it is read ahead only if that is
        # asked for; it is read and sent while the device computes the step before it in any case.
        return BackgroundCopier(self.send) if self.num_workers > 0 or self._non_blocking else None

    def _read(self, skip: int) -> Iterator[Any]:
        """Torch's iterator over the batches after the first `skip`, its order drawn."""
        if self._source is None:
            batches = self._begun()
            for _ in islice(batches, skip):
                pass
            return batches
        self._source.skip = skip
        batches = self._begun()
        self._source.current.begin()
        return batches

    def _counted(self, batches: Iterator[Any], indices: sharding.BatchIndices) -> Iterator[tuple[Any, bool]]:
        """Each batch with whether it is the last, which its indices show."""
        count = self._given_before(batches)
        for batch in batches:
            count += 1
            yield batch, indices.exhausted and count == indices.given

    def _given_before(self, batches: Any) -> int:
        """The number of indices that were read and passed over before the first batch."""
        return 0

    @property
    def last_step(self) -> sharding.LastStep | None:
        if self._dealt_by_workers:
            return self._step
        dealer = self._dealer
        if hasattr(dealer, "last_step"):
            return dealer.last_step  # type: ignore[no-any-return]  # a share's own
        # the last batch of the one process there is; processes that share no data don't know of each other's
        if current_world().size > 1:
            return None
        last = None if self._source is None else self._source.current.last
        size = len(last) if isinstance(last, Sized) else self.remainder
        return sharding.LastStep(size, size) if size > 0 else None

    @property
    def filled_step(self) -> sharding.LastStep | None:
        return self._step if self._dealt_by_workers else super().filled_step

    @property
    def repeats(self) -> sharding.LastStep | None:
        if not self._dealt_by_workers or self._repeated == 0:
            return self.last_step
        dealt = self.step_size or 1
        return sharding.LastStep(dealt - self._repeated, dealt, whole=self.batch_size is None)

    @property
    def _dealt_by_workers(self) -> bool:
        """Whether what deals out the data are copies in other processes, each of which fills up its own last step."""
        return isinstance(self.dataset, sharding.IterableDatasetShard) and self.num_workers > 0

    @property
    def leads(self) -> bool:
        return int(getattr(self._dealer, "process_index", 0)) == 0

    @property
    def _dealer(self) -> Any:
        """The object that deals out this process's share, where it is a share."""
        if isinstance(self.dataset, sharding.IterableDatasetShard):
            return self.dataset
        source = sharding.index_source(self)
        return self.sampler if source is None else source

    @property
    def stride(self) -> int:
        dealer = self._dealer
        return 1 if getattr(dealer, "split_batches", False) else getattr(dealer, "num_processes", 1)

    @property
    def total_batch_size(self) -> int:
        """The number of samples that all processes together take in a step."""
        size = self.step_size
        if size is None:
            raise StateError(
                f"total_batch_size was requested, but {type(sharding.index_source(self)).__name__} does not say how large its batches "
                "are. Give it an attribute `batch_size`."
            )
        return size

    @property
    def step_size(self) -> int | None:
        if isinstance(self.dataset, sharding.IterableDatasetShard):
            return self.dataset.round_size
        source = sharding.index_source(self)
        size: int | None = self.batch_size if source is None else getattr(source, "batch_size", None)
        return None if size is None else size * self.stride

    def _samples_of_last_step(self) -> int:
        size = self.step_size
        if self._drop_last or size is None:
            return -1
        whole = self.dataset.dataset if isinstance(self.dataset, sharding.IterableDatasetShard) else self.dataset
        length = length_of(sharding.get_sampler(self))
        length = length_of(whole) if length is None else length
        return -1 if length is None else length % size
