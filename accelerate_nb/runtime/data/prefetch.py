"""The transfer of the next batch to the device while the current one is computed on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any, TypeAlias

import torch
from torch import Tensor

from accelerate_nb.runtime.data.batch_tree import is_column
from accelerate_nb.runtime.operations.nested import leaves_of, placed

_PLAIN = (str, bytes, int, float, bool, list, tuple, type(None))
# A device that no longer responds does not keep a loop from being left.
_LIMIT = 10.0
# The function that sends a batch, the batch, and where what it becomes is waited for.
_Job: TypeAlias = tuple[Callable[[Any], Any], Any, Future[Any]]


def one_copy_ahead(batches: Iterable[tuple[Any, bool]], copier: BatchCopier) -> Generator[tuple[Any, bool], None, None]:
    """
    The copied batches, each handed out once the copy of the next one has been set off.

    What goes wrong while the next one is read is raised when its turn comes, not in place of the one before it.
    """
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


def overlapping(device: Any, non_blocking: bool) -> BatchCopier | None:
    """The copier that runs beside the computation; `None` where nothing can, or where none is requested."""
    return SideStreamCopier(torch.device(device)) if non_blocking and torch.device(device).type == "cuda" else None


class SideStreamCopier:
    """
    Copies on a CUDA stream of their own, from the host's memory.

    The memory is pinned where the loader has `pin_memory=True`; from other memory the copy is right, and does not overlap.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

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
    """
    Sends batches in a thread of its own, for a device whose transfers take the host's time.

    The thread reads nothing: data sets, collate functions and samplers draw from generators that belong to the whole process,
    and which numbers they got would depend on where the loop happens to be at that moment.
    """

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
    return all(_is_plain(leaf) for leaf in leaves_of(batch, is_column, records=True))


def _is_plain(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.device.type == "cpu" and leaf.layout == torch.strided and not leaf.is_nested
    return isinstance(leaf, _PLAIN)


# Copies a batch in two steps, `begin` and `finish`, between which others can run.
BatchCopier: TypeAlias = SideStreamCopier | BackgroundCopier
