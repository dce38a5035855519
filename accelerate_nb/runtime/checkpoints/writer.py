"""The writer of a checkpoint's files and of a model's weights: past the page cache to the disk, where the system can."""

from __future__ import annotations

import io
import json
import logging
import mmap
import os
import pickle
import re
import shutil
import sys
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

from accelerate_nb.errors import CheckpointError, ConfigurationError
from accelerate_nb.runtime.checkpoints import file_names as names, manifest
from accelerate_nb.runtime.checkpoints.host_copy import brought, memory_range, storage
from accelerate_nb.runtime.checkpoints.load_file import shared_setting
from accelerate_nb.runtime.checkpoints.manifest import ManifestEntry, entry_of, folded, sums_of

T = TypeVar("T")

_logger = logging.getLogger("accelerate_nb.utils.other")
_UNITS = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3, "TIB": 2**40, "GIB": 2**30, "MIB": 2**20, "KIB": 2**10}
_WEIGHT_FILE = re.compile(
    r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
    r"|pytorch_model(-\d{5}-of-\d{5})?\.bin|pytorch_model\.bin\.index\.json"
)
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
    """A file to be: its name or path in the folder, what goes into it, and whether that are tensors for safetensors."""

    name: str
    content: Any
    safe: bool = False

    def write(self, folder: Path, blocks: DirectWriter) -> ManifestEntry:
        """Write the file to a folder and wait until the disk has it."""
        path, size = folder / self.name, size_of(self.content)
        with named(path, _FAILURES):
            if path.parent != folder:  # `optimizer_0/common.pt` for one
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


def file_of_weights(state: Mapping[str, Any], name: str, *, safe: bool) -> FileToWrite:
    """A file of weights, with safetensors or as torch's own pickle."""
    return FileToWrite(name, without_aliases(state) if safe else dict(state), safe)


def files_of(stem: str, objects: Iterable[Any]) -> list[FileToWrite]:
    """The states of some objects of one kind, as files under the names that Accelerate gives them."""
    return [FileToWrite(names.numbered(stem, index), object_.state_dict()) for index, object_ in enumerate(objects)]


def write_files(files: Sequence[FileToWrite], folder: Path, *, threads: int = 1) -> dict[str, ManifestEntry]:
    """Write all files, with several threads some of them at the same time; returns what was written."""
    contents = brought([file.content for file in files])
    with _sums(), _executor(threads, "disk") as disk, _executor(threads, "checkpoint") as pool:
        # each file that is filled holds one block, and one is on its way for each thread
        blocks = DirectWriter(2 * threads + 1, disk)
        brought_files = map(lambda file, content: replace(file, content=content), files, contents)
        written = pool.map(lambda file: file.write(folder, blocks), brought_files)
        return dict(zip((file.name for file in files), written, strict=True))


def save_model_files(state: Mapping[str, Any], folder: Path, max_shard_size: int | str, *, safe: bool) -> None:
    """Write a model's weights in as many files as their size needs, in place of all weights in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    state = brought(state)
    tensors = without_aliases(state) if safe else dict(state)
    base, suffix = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    groups = in_groups(tensors.items(), lambda item: size_of(item[1]), parse_size(max_shard_size))
    shards = [dict(group) for group in groups] or [{}]
    files = [f"{base}-{number:05d}-of-{len(shards):05d}.{suffix}" for number in range(1, len(shards) + 1)]
    files = files if len(shards) > 1 else [f"{base}.{suffix}"]
    draft = folder / f".{base}.incomplete"
    remove(draft)
    draft.mkdir()
    try:
        weights = [file_of_weights(shard, name, safe=safe) for name, shard in zip(files, shards, strict=True)]
        entries = write_files(weights, draft)
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": size_of(shards)},
                "weight_map": {key: name for name, shard in zip(files, shards, strict=True) for key in shard},
            }
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            write_file(draft / f"{base}.{suffix}.index.json", lambda file: file.write(text.encode()))
        written = {path.name for path in draft.iterdir()}
        for name in written:
            (draft / name).replace(folder / name)
        # a loader prefers one kind of file over the other, so weights of a former save would come back as the newer ones
        old = {path.name for path in folder.iterdir() if _WEIGHT_FILE.fullmatch(path.name)} - written
        for name in old:
            (folder / name).unlink()
        _update_manifest(folder, entries, old)
        sync(folder)
    finally:
        remove(draft)


def _update_manifest(folder: Path, written: Mapping[str, ManifestEntry], deleted: set[str]) -> None:
    """Correct the list of a checkpoint whose weights were replaced, if the folder is one."""
    path = folder / names.MANIFEST_NAME
    with suppress(CheckpointError):  # `load_state` names a list that can't be read
        content = manifest.read(folder)
        if content is None:
            return
        listed = {name: written.get(name, entry) for name, entry in content["files"].items() if name not in deleted}
        before = path.stat()
        write_file(path, lambda file: file.write(manifest.to_bytes(listed)))
        # the time of the checkpoint, by which `resume` chooses
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def parse_size(size: float | str) -> int:
    """A number of bytes, from a number, also `inf`, or from text such as "10GB"; "10Gb" are bits."""
    if isinstance(size, (int, float, np.number)) and size >= 0:
        return int(min(size, sys.maxsize))
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([A-Za-z]+)\s*", str(size))
    if match is None or match[2].upper() not in _UNITS:
        raise ConfigurationError(
            f"{size!r} is not a size. Write a number of bytes, or text such as '5GB' with one of the units "
            f"{', '.join(_UNITS)}."
        )
    number = int(float(match[1]) * _UNITS[match[2].upper()])
    return number // 8 if re.fullmatch("[kmgt]b", match[2], re.IGNORECASE) and match[2].endswith("b") else number


def without_aliases(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors, each under its first name only; parts of one memory become separate, as safetensors requires."""
    seen: set[tuple[Any, ...]] = set()
    storages: set[int] = set()
    kept: dict[str, Tensor] = {}
    removed: set[str] = set()
    for name, tensor in state.items():
        if memory_range(tensor) in seen and tensor.numel():
            removed.add(name)
            continue
        seen.add(memory_range(tensor))
        whole = storage(tensor)
        kept[name] = tensor.clone().contiguous() if whole in storages else tensor.contiguous()
        storages.add(whole)
    if removed:
        _logger.warning(
            "Removed shared tensor %s while saving: safetensors keeps each memory under one name. Loading into a model that "
            "shares them fills them in.",
            removed,
        )
    return kept


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


_sums = shared_setting(_without_zip_sums)


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
    """A file as `torch.save` writes to one; nothing that goes wrong is raised before `finish`."""

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
