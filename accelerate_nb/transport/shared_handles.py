"""Multiprocessing's own objects among the arguments: queues, pipes and shared memory keep meaning the same thing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import get_spawning_popen, set_spawning_popen


class TransferredFd:
    """A descriptor that goes along with a payload; in the worker, `detach()` gives the worker's own."""

    # the worker's descriptors, in the order of their indices
    arrived: tuple[int, ...] = ()

    def __init__(self, index: int) -> None:
        self._index = index

    def detach(self) -> int:
        """A descriptor of one's own; the caller closes it."""
        return os.dup(type(self).arrived[self._index])


class FdCollector:
    """A stand-in for multiprocessing's process being spawned: it collects the descriptors that the process will need."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def duplicate_for_child(self, descriptor: int) -> int:
        """Take a descriptor along; returns its index."""
        self.descriptors.append(os.dup(descriptor))
        return len(self.descriptors) - 1

    def DupFd(self, index: int) -> TransferredFd:  # noqa: N802 - the name that multiprocessing calls
        """The object that is pickled in place of a descriptor."""
        return TransferredFd(index)

    def close(self) -> None:
        """Close the copies that were taken along."""
        while self.descriptors:
            os.close(self.descriptors.pop())


@contextmanager
def collecting() -> Iterator[FdCollector]:
    """While something is pickled for workers, multiprocessing's objects see a process being spawned."""
    before = get_spawning_popen()
    collector = FdCollector()
    set_spawning_popen(collector)  # type: ignore[arg-type]  # it has the methods that are called
    try:
        yield collector
    except BaseException:
        collector.close()
        raise
    finally:
        set_spawning_popen(before)
