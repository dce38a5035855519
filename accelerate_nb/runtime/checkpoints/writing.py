"""How the files of a checkpoint are written and brought to the disk."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from accelerate_nb.errors import CheckpointError
from accelerate_nb.runtime.checkpoints.committing import sync
from accelerate_nb.runtime.checkpoints.manifest import Entry, entry_of

# What torch, safetensors, pickle and the system raise where a value can't be written, or the disk is full.
_FAILURES = (OSError, RuntimeError, ValueError, TypeError, AttributeError, pickle.PicklingError, SafetensorError)


@dataclass(frozen=True, slots=True)
class File:
    """A file to be: its name, what goes into it, and whether that is a dictionary of tensors for safetensors."""

    name: str
    content: Any
    safe: bool = False

    def write(self, folder: Path) -> Entry:
        """Write the file to a folder and wait until the disk has it."""
        path = folder / self.name
        with named(path, _FAILURES):
            if self.safe:
                save_file(self.content, path, metadata={"format": "pt"})
            else:
                # torch writes to a path by itself, and to an open file through copies
                torch.save(self.content, os.fspath(path))
            sync(path)
            return entry_of(path)


def write_files(files: Sequence[File], folder: Path, *, threads: int = 1) -> dict[str, Entry]:
    """Write all files, the first of them at the same time; says what was written."""
    if threads == 1 or len(files) < 2:
        return {file.name: file.write(folder) for file in files}
    with ThreadPoolExecutor(threads, thread_name_prefix="accelerate_nb checkpoint") as pool:
        written = pool.map(lambda file: file.write(folder), files)
        return dict(zip([file.name for file in files], written, strict=True))


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
