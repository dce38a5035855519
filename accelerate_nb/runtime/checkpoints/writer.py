"""The writer of a checkpoint's files: past the page cache to the disk, where the system can."""

from __future__ import annotations

import io
import json
import mmap
import os
import pickle
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save as to_bytes
from torch import Tensor

from accelerate_nb.errors import CheckpointError
from accelerate_nb.runtime.checkpoints import file_names as names
from accelerate_nb.runtime.checkpoints.host_copy import brought
from accelerate_nb.runtime.checkpoints.load_file import SharedSetting
from accelerate_nb.runtime.checkpoints.manifest import ManifestEntry, entry_of, folded, sums_of

T = TypeVar("T")

# What torch, safetensors, pickle and the system raise where a value can't be written, or the disk is full.
_FAILURES = (OSError, RuntimeError, ValueError, TypeError, AttributeError, pickle.PicklingError, SafetensorError)
# A larger file goes to the disk by blocks.
_LARGE = 4 << 20
BLOCK = 8 << 20
_ALIGNED = 4096
# https://huggingface.co/docs/safetensors: eight bytes with the header's length, the header as JSON, then the tensors.
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


@dataclass(frozen=True, slots=True)
class FileToWrite:
    """
    A file to be: its name, what goes into it, and whether that is a dictionary of tensors for safetensors.

    A name such as `optimizer_0/common.pt` is in a folder that is made where it is not there yet.
    """

    name: str
    content: Any
    safe: bool = False

    def write(self, folder: Path, blocks: DirectWriter) -> ManifestEntry:
        """Write the file to a folder and wait until the disk has it."""
        path, size = folder / self.name, size_of(self.content)
        with named(path, _FAILURES):
            if path.parent != folder:
                path.parent.mkdir(parents=True, exist_ok=True)
            if size < _LARGE:
                small = io.BytesIO()
                self.fill(small)
                path.write_bytes(small.getbuffer())
                sync(path)
                return entry_of(path)
            file = DiskFile(path, size, blocks)
            try:
                self.fill(file)
            finally:
                entry = file.finish()
            return entry

    def fill(self, file: Any) -> None:
        """Write the content to something that takes bytes."""
        if not self.safe:
            torch.save(self.content, file)
            return
        tensors: Mapping[str, Tensor] = self.content
        plain = (Tensor, torch.nn.Parameter)
        if any(item.dtype not in DTYPE_NAMES or type(item) not in plain for item in tensors.values()):
            whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
            file.write(to_bytes(whole, metadata={"format": "pt"}))
            return
        begin, order = layout(tensors)
        file.write(begin)
        for name in order:
            write_numbers(tensors[name], file)


class VerbatimFile(FileToWrite):
    """A file whose content is bytes."""

    def fill(self, file: Any) -> None:
        """Write the bytes as they are."""
        file.write(self.content)


class LastFile(FileToWrite):
    """A file of the main process that needs what the other processes have written: it is written when all of them are done."""

    def write_last(self, folder: Path) -> dict[str, ManifestEntry]:
        """Write the file; returns its entry, and those of other processes' files that became known."""
        raise NotImplementedError


def files_of(stem: str, objects: Iterable[Any]) -> list[FileToWrite]:
    """The states of some objects of one kind, as files under the names that Accelerate gives them."""
    return [FileToWrite(names.numbered(stem, index), object_.state_dict()) for index, object_ in enumerate(objects)]


def write_files(files: Sequence[FileToWrite], folder: Path, *, threads: int = 1) -> dict[str, ManifestEntry]:
    """Write all files, with several threads some of them at the same time; returns what was written."""
    contents = brought([file.content for file in files])
    with _sums.block(), _executor(threads, "disk") as disk, _executor(threads, "checkpoint") as pool:
        # each file that is filled holds one block, and one is on its way for each thread
        blocks = DirectWriter(2 * threads + 1, disk)
        brought_files = map(lambda file, content: replace(file, content=content), files, contents)
        written = pool.map(lambda file: file.write(folder, blocks), brought_files)
        return dict(zip((file.name for file in files), written, strict=True))


def _executor(threads: int, name: str) -> Executor:
    return _InThisThread() if threads == 1 else ThreadPoolExecutor(threads, thread_name_prefix=f"accelerate_nb {name}")


class _InThisThread(Executor):
    """Does at once what it is given: a pool takes nothing any more when a program ends, and a save in the background goes on then."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except (OSError, CheckpointError) as error:
            done.set_exception(error)
        return done


def size_of(value: Any) -> int:
    """The number of bytes of the tensors in a nested value."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(size_of(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return sum(size_of(item) for item in value if isinstance(item, (Tensor, Mapping, list, tuple)))
    return 0


def in_groups(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """The items in their order, in groups whose sizes add up to at most `limit`; a larger item is alone."""
    group: list[T] = []
    total = 0
    for item in items:
        needed = size(item)
        if group and total + needed > limit:
            yield group
            group, total = [], 0
        group.append(item)
        total += needed
    if group:
        yield group


@contextmanager
def _without_zip_sums() -> Iterator[None]:
    """`torch.load` never checks the sums that zip files have, and the checkpoint's list has sums of its own."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


_sums = SharedSetting(_without_zip_sums)


@contextmanager
def named(path: Path, failures: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
    """A block that writes a file or a folder: these failures are a `CheckpointError` that names it."""
    try:
        yield
    except CheckpointError:
        raise
    except failures as error:
        raise CheckpointError(f"{path.name} could not be written to {path.parent}: {error}") from error


def write_file(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Write a file beside its path, bring it to the disk, then rename it: a reader sees the old one or the new one."""
    draft = path.with_name(f".{path.name}.incomplete-{os.getpid()}")
    try:
        with draft.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


class DirectWriter:
    """The memory through which files go to the disk, a block at a time, and the threads that write it."""

    def __init__(self, count: int, pool: Executor) -> None:
        self.pool = pool
        self.free: SimpleQueue[np.ndarray[Any, Any]] = SimpleQueue()
        for _ in range(count):
            # what goes past the page cache begins at the beginning of a page; a huge page costs less to be touched first
            memory = mmap.mmap(-1, BLOCK)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with suppress(OSError):  # a system that was built without
                    memory.madvise(mmap.MADV_HUGEPAGE)
            self.free.put(np.frombuffer(memory, np.uint8))


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
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            self._descriptor = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)
        except OSError:
            self._descriptor = os.open(path, flags, 0o666)  # a file system without a way past the page cache
        self._written: list[Future[list[int]]] = []
        self._block: np.ndarray[Any, Any] | None = None
        self._length = 0
        self._position = 0
        if hasattr(os, "posix_fallocate") and size > BLOCK:
            # blocks that extend a file are written one after the other
            with suppress(OSError):  # a full disk is found by what is written to it
                os.posix_fallocate(self._descriptor, 0, size)

    def write(self, data: Any) -> int:
        """Take bytes; they are on their way to the disk, or wait for more to fill a block."""
        source = np.frombuffer(data, np.uint8)
        done = 0
        while done < len(source):
            if self._block is None:
                self._block = self._blocks.free.get(timeout=600)
            part = source[done : done + BLOCK - self._length]
            np.copyto(self._block[self._length : self._length + len(part)], part)
            self._length += len(part)
            done += len(part)
            if self._length == BLOCK:
                self._send()
        return len(source)

    def tell(self) -> int:
        """The number of bytes so far."""
        return self._position + self._length

    def flush(self) -> None:
        """Nothing is done before `finish`."""

    def finish(self) -> ManifestEntry:
        """Wait until the disk has everything; returns what was written, or raises the `OSError` that kept it from that."""
        try:
            size = self.tell()
            if self._block is not None:
                self._block[self._length :] = 0
                self._length = -(-self._length // _ALIGNED) * _ALIGNED
                self._send()
            wait(self._written)
            sums = [sum_ for written in self._written for sum_ in written.result()]
            os.ftruncate(self._descriptor, size)
            os.fsync(self._descriptor)
            return ManifestEntry(size, folded(sums))
        finally:
            os.close(self._descriptor)

    def _send(self) -> None:
        assert self._block is not None
        self._written.append(self._blocks.pool.submit(self._put, self._block, self._length, self._position))
        self._block, self._length, self._position = None, 0, self._position + self._length

    def _put(self, block: np.ndarray[Any, Any], length: int, position: int) -> list[int]:
        try:
            sums = sums_of(block[:length], position >> 20)
            rest = block[:length].data
            while rest:
                count = os.pwrite(self._descriptor, rest, position)
                rest, position = rest[count:], position + count
            return sums
        finally:
            self._blocks.free.put(block)


def layout(tensors: Mapping[str, Tensor]) -> tuple[bytes, list[str]]:
    """The header of a file of these tensors, which may be on the meta device, and the order in which they follow."""
    # wide numbers come first, so that each tensor begins at a multiple of its numbers' width
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor, begin = tensors[name], end
        end += tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, names


def write_numbers(tensor: Tensor, file: Any) -> None:
    """Write a tensor's numbers to an open file."""
    if tensor.numel():
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        file.write(flat.view(torch.uint8).numpy().data)


def remove(path: Path) -> None:
    """Delete a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Bring a file, or a folder's list of names, to the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
