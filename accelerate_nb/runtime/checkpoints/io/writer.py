"""The writer of a checkpoint's files, which brings them to the disk."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor

from accelerate_nb.errors import CheckpointError
from accelerate_nb.runtime.checkpoints import file_names as names
from accelerate_nb.runtime.checkpoints.io.atomic_commit import sync
from accelerate_nb.runtime.checkpoints.io.device_copy import brought
from accelerate_nb.runtime.checkpoints.io.direct_io import DirectWriter, DiskFile
from accelerate_nb.runtime.checkpoints.io.process_setting import SharedSetting
from accelerate_nb.runtime.checkpoints.io.safetensors_writer import write_safetensors
from accelerate_nb.runtime.checkpoints.manifest import ManifestEntry, entry_of

T = TypeVar("T")

# What torch, safetensors, pickle and the system raise where a value can't be written, or the disk is full.
_FAILURES = (OSError, RuntimeError, ValueError, TypeError, AttributeError, pickle.PicklingError, SafetensorError)
# A larger file goes to the disk by blocks.
_LARGE = 4 << 20


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
        if self.safe:
            write_safetensors(self.content, file)
        else:
            torch.save(self.content, file)


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
    names, contents = [file.name for file in files], brought([file.content for file in files])
    files = [replace(file, content=content) for file, content in zip(files, contents, strict=True)]
    with _sums.block():
        if threads == 1:
            blocks = DirectWriter(1)
            return {file.name: file.write(folder, blocks) for file in files}
        with (
            ThreadPoolExecutor(threads, thread_name_prefix="accelerate_nb disk") as disk,
            ThreadPoolExecutor(threads, thread_name_prefix="accelerate_nb checkpoint") as pool,
        ):
            # each file that is filled holds one block, and one is on its way for each thread
            blocks = DirectWriter(2 * threads + 1, disk)
            written = pool.map(lambda file: file.write(folder, blocks), files)
            return dict(zip(names, written, strict=True))


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
