"""The layout of a memory file: some entries of bytes, each where it can be mapped and used without a copy."""

import mmap
import os
import struct
import tempfile
from collections.abc import Sequence
from typing import TypeAlias

Bytes: TypeAlias = "bytes | bytearray | memoryview"

# Entries start at multiples of this: what numpy and torch want of a vector's address.
_ALIGNED = 64
_COUNT = struct.Struct("<Q")
_ENTRY = struct.Struct("<QQ")
_MOST_AT_ONCE = 1 << 30


def memory_file(name: str) -> int:
    """A descriptor of a file in memory that vanishes with its last descriptor (an unlinked file where there is no memfd)."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    descriptor, path = tempfile.mkstemp(prefix=name)
    os.unlink(path)
    return descriptor


def write_entries(descriptor: int, entries: Sequence[Bytes]) -> None:
    """Write the entries from the start of a file, with a table of their offsets in front."""
    offset = _aligned(_COUNT.size + _ENTRY.size * len(entries))
    table = [_COUNT.pack(len(entries))]
    starts = []
    for entry in entries:
        length = memoryview(entry).nbytes
        table.append(_ENTRY.pack(offset, length))
        starts.append(offset)
        offset = _aligned(offset + length)
    os.ftruncate(descriptor, offset)
    # the table comes last: a file whose writer died half way has no entries
    for start, entry in zip(starts, entries, strict=True):
        _write_at(descriptor, start, entry)
    _write_at(descriptor, 0, b"".join(table))


def map_entries(descriptor: int) -> list[memoryview]:
    """The entries of a file, as memory of one's own: shared until written to, and a write changes nobody else's."""
    size = os.fstat(descriptor).st_size
    if size == 0:
        return []
    whole = memoryview(mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    (count,) = _COUNT.unpack_from(whole, 0)
    return [whole[offset : offset + length] for offset, length in _table(whole, count)]


def read_entries(descriptor: int) -> list[bytearray]:
    """The entries of a file, copied: nothing of the file is held afterwards. Empty where the writer did not finish."""
    head = os.pread(descriptor, _COUNT.size, 0)
    if len(head) < _COUNT.size or not (count := _COUNT.unpack(head)[0]):
        return []
    table = os.pread(descriptor, _COUNT.size + _ENTRY.size * count, 0)
    entries = []
    for offset, length in _table(memoryview(table), count):
        entries.append(bytearray(length))
        rest = memoryview(entries[-1])
        while rest and (size := os.preadv(descriptor, [rest[:_MOST_AT_ONCE]], offset)):
            rest, offset = rest[size:], offset + size  # noqa: PLW2901 - it is where the next part begins
    return entries


def _table(whole: memoryview, count: int) -> list[tuple[int, int]]:
    start, size = _COUNT.size, _ENTRY.size
    return [_ENTRY.unpack_from(whole, start + size * index) for index in range(count)]


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNED) * _ALIGNED


def _write_at(descriptor: int, offset: int, entry: Bytes) -> None:
    rest = memoryview(entry).cast("B")
    while rest:
        written = os.pwrite(descriptor, rest[:_MOST_AT_ONCE], offset)
        rest, offset = rest[written:], offset + written
