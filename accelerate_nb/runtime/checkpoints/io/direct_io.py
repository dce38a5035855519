"""A file that is written to the disk in large blocks, several at a time, past the page cache where the system can."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from accelerate_nb.runtime.checkpoints.manifest import ManifestEntry, folded, sums_of

BLOCK = 8 << 20
_ALIGNED = 4096


class DirectWriter:
    """The memory through which files go to the disk, a block at a time, and the threads that write it."""

    def __init__(self, count: int, pool: Executor | None = None) -> None:
        self.pool = pool
        self._free: SimpleQueue[np.ndarray[Any, Any]] = SimpleQueue()
        for _ in range(count):
            # what goes past the page cache begins at the beginning of a page
            self._free.put(np.frombuffer(large_memory(BLOCK), np.uint8))

    def take(self) -> np.ndarray[Any, Any]:
        """A block that is free; waits for one."""
        return self._free.get(timeout=600)

    def give_back(self, block: np.ndarray[Any, Any]) -> None:
        """The block may be used again."""
        self._free.put(block)


def large_memory(size: int) -> mmap.mmap:
    """Memory that begins with a page, in huge pages where the system has them: touching it first is what costs most."""
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system that was built without
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class DiskFile:
    """
    A file as `torch.save` writes to one; nothing that goes wrong is raised before `finish`.

    >>> file = DiskFile(path, size, blocks)  # doctest: +SKIP
    >>> file.write(b"...")  # doctest: +SKIP
    >>> file.finish()  # doctest: +SKIP
    ManifestEntry(bytes=3, sum=3026478)
    """

    def __init__(self, path: Path, size: int, blocks: DirectWriter) -> None:
        self._blocks = blocks
        self._descriptor = _open(path)
        self._written: list[Future[list[int]]] = []
        self._sums: list[int] = []
        self._block: np.ndarray[Any, Any] | None = None
        self._length = 0
        self._position = 0
        self._error: OSError | None = None
        if hasattr(os, "posix_fallocate") and size > BLOCK:
            # blocks that extend a file are written one after the other
            with self._noting():
                os.posix_fallocate(self._descriptor, 0, size)

    def write(self, data: Any) -> int:
        """Take bytes; they are on their way to the disk, or wait for more to fill a block."""
        source = np.frombuffer(data, np.uint8)
        done = 0
        while done < len(source) and self._error is None:
            if self._block is None:
                self._block = self._blocks.take()
            part = source[done : done + BLOCK - self._length]
            np.copyto(self._block[self._length : self._length + len(part)], part)
            self._length += len(part)
            done += len(part)
            if self._length == BLOCK:
                self._send()
        return len(source)

    def flush(self) -> None:
        """Nothing is done before `finish`."""

    def finish(self) -> ManifestEntry:
        """Wait until the disk has everything; returns what was written, or raises the `OSError` that kept it from that."""
        try:
            size = self._position + self._length
            if self._block is not None:
                self._block[self._length :] = 0
                self._length = -(-self._length // _ALIGNED) * _ALIGNED
                self._send()
            for written in self._written:
                with self._noting():
                    self._sums += written.result()
            if self._error is not None:
                raise self._error
            os.ftruncate(self._descriptor, size)
            os.fsync(self._descriptor)
            return ManifestEntry(size, folded(self._sums))
        finally:
            os.close(self._descriptor)

    def _send(self) -> None:
        block, length, position = self._block, self._length, self._position
        assert block is not None
        self._block, self._length, self._position = None, 0, position + length
        if self._blocks.pool is not None:
            self._written.append(self._blocks.pool.submit(self._put, block, length, position))
            return
        with self._noting():
            self._sums += self._put(block, length, position)

    def _put(self, block: np.ndarray[Any, Any], length: int, position: int) -> list[int]:
        try:
            sums = sums_of(block[:length], position >> 20)
            rest = block[:length].data
            while rest:
                count = os.pwrite(self._descriptor, rest, position)
                rest, position = rest[count:], position + count
            return sums
        finally:
            self._blocks.give_back(block)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._error = self._error or error


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)
    except OSError:
        return os.open(path, flags, 0o666)  # a file system without a way past the page cache
