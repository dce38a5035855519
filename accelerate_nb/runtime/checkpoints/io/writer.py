"""How the files of a checkpoint are written and brought to the disk."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from torch import Tensor

from accelerate_nb.errors import CheckpointError
from accelerate_nb.runtime.checkpoints import names
from accelerate_nb.runtime.checkpoints.bringing import brought
from accelerate_nb.runtime.checkpoints.committing import sync
from accelerate_nb.runtime.checkpoints.disk import Blocks, DiskFile
from accelerate_nb.runtime.checkpoints.holding import Held
from accelerate_nb.runtime.checkpoints.manifest import Entry, entry_of
from accelerate_nb.runtime.checkpoints.safetensors import write_safetensors

# What torch, safetensors, pickle and the system raise where a value can't be written, or the disk is full.
_FAILURES = (OSError, RuntimeError, ValueError, TypeError, AttributeError, pickle.PicklingError, SafetensorError)


# A larger file goes to the disk by blocks.
_LARGE = 4 << 20


@dataclass(frozen=True, slots=True)
class File:
    """A file to be: its name, what goes into it, and whether that is a dictionary of tensors for safetensors."""

    name: str
    content: Any
    safe: bool = False

    def write(self, folder: Path, blocks: Blocks) -> Entry:
        """Write the file to a folder and wait until the disk has it."""
        path, size = folder / self.name, size_of(self.content)
        with named(path, _FAILURES):
            if size < _LARGE:
                small = io.BytesIO()
                self._fill(small)
                path.write_bytes(small.getbuffer())
                sync(path)
                return entry_of(path)
            file = DiskFile(path, size, blocks)
            try:
                self._fill(file)
            finally:
                entry = file.finish()
            return entry

    def _fill(self, file: Any) -> None:
        if self.safe:
            write_safetensors(self.content, file)
        else:
            torch.save(self.content, file)


def files_of(stem: str, objects: Iterable[Any]) -> list[File]:
    """The states of some objects of one kind, as files under the names that Accelerate gives them."""
    return [File(names.numbered(stem, index), each.state_dict()) for index, each in enumerate(objects)]


def write_files(files: Sequence[File], folder: Path, *, threads: int = 1) -> dict[str, Entry]:
    """Write all files, with several threads some of them at the same time; says what was written."""
    names, contents = [file.name for file in files], brought([file.content for file in files])
    files = [replace(file, content=content) for file, content in zip(files, contents, strict=True)]
    with _sums.block():
        if threads == 1:
            blocks = Blocks(1)
            return {file.name: file.write(folder, blocks) for file in files}
        with (
            ThreadPoolExecutor(threads, thread_name_prefix="accelerate_nb disk") as disk,
            ThreadPoolExecutor(threads, thread_name_prefix="accelerate_nb checkpoint") as pool,
        ):
            # each file that is filled holds one block, and one is on its way for each thread
            blocks = Blocks(2 * threads + 1, disk)
            written = pool.map(lambda file: file.write(folder, blocks), files)
            return dict(zip(names, written, strict=True))


def size_of(value: Any) -> int:
    """How many bytes the tensors in a nested value have."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(size_of(each) for each in value.values())
    if isinstance(value, (list, tuple)):
        return sum(size_of(each) for each in value if isinstance(each, (Tensor, Mapping, list, tuple)))
    return 0


@contextmanager
def _without_zip_sums() -> Iterator[None]:
    """`torch.load` never looks at the sums that zip files have, and the checkpoint's list has sums of its own."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


_sums = Held(_without_zip_sums)


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
    """Write a file beside its place, bring it to the disk, then rename it: a reader sees the old one or the new one."""
    draft = path.with_name(f".{path.name}.incomplete-{os.getpid()}")
    try:
        with draft.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
