"""The files of a state in parts, as `torch.distributed.checkpoint` writes them: each process's own, and one list of all."""

from __future__ import annotations

import json
import pickle
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta

from accelerate_nb.errors import CheckpointError
from accelerate_nb.runtime.checkpoints.io.atomic_commit import sync
from accelerate_nb.runtime.checkpoints.io.direct_io import DirectWriter
from accelerate_nb.runtime.checkpoints.io.writer import FileToWrite, LastFile, named
from accelerate_nb.runtime.checkpoints.manifest import ManifestEntry, entry_of
from accelerate_nb.runtime.operations.collective import gather_object
from accelerate_nb.runtime.world.world import World

LIST = ".metadata"
_VERSION = "1.0.0"


def files_of_parts(world: World, name: str, state: Mapping[str, Any]) -> list[FileToWrite]:
    """
    The files of a state, to be written to a folder of this name; all processes call it.

    Of a tensor that several processes have one writes it. What is in parts are torch's DTensors, nested as they may be.
    """
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=False)
    planner.set_up_planner(dict(state), is_coordinator=world.is_main)
    plans = gather_object([planner.create_local_plan()])
    plans, metadata = planner.create_global_plan(plans)
    own = planner.finish_plan(plans[world.rank])
    contents = [planner.resolve_data(item) for item in own.items]
    tensors = [content.detach() if isinstance(content, Tensor) else content.getvalue() for content in contents]
    files: list[FileToWrite] = [PartFile(f"{name}/{part_name(world.rank)}", tensors)]
    if world.is_main:
        files.append(
            PartList(f"{name}/{LIST}", metadata, indices=[[item.index for item in plan.items] for plan in plans])
        )
    return files


@dataclass(frozen=True, slots=True)
class PartFile(FileToWrite):
    """One process's tensors and bytes, one after the other; a note beside the file has their lengths, until the list is there."""

    lengths: list[int] = field(default_factory=list)

    def write(self, folder: Path, blocks: DirectWriter) -> ManifestEntry:
        path = folder / self.name
        entry = FileToWrite.write(self, folder, blocks)
        with named(path):
            _note(path).write_text(json.dumps({"lengths": self.lengths, "entry": asdict(entry)}), encoding="utf-8")
        return entry

    def fill(self, file: Any) -> None:
        self.lengths.clear()
        for item in self.content:
            counter: Any = _Counter(file)  # of a file it has what torch calls
            if isinstance(item, Tensor):
                # what is saved of a tensor is its whole storage
                torch.save(item if item.untyped_storage().nbytes() == item.nbytes else item.clone(), counter)
            else:
                counter.write(item)
            self.lengths.append(counter.count)


@dataclass(frozen=True, slots=True)
class PartList(LastFile):
    """The list of all parts: the file, the offset and the length of each."""

    indices: Sequence[Sequence[MetadataIndex]] = ()

    def write_last(self, folder: Path) -> dict[str, ManifestEntry]:
        path = folder / self.name
        places: dict[MetadataIndex, _StorageInfo] = {}
        entries: dict[str, ManifestEntry] = {}
        for rank, indices in enumerate(self.indices):
            part = path.parent / part_name(rank)
            note = _read_note(part, rank)
            offset = 0
            for index, length in zip(indices, note["lengths"], strict=True):
                places[index] = _StorageInfo(part.name, offset, length)
                offset += length
            entries[part.relative_to(folder).as_posix()] = ManifestEntry(**note["entry"])
        metadata = replace(
            self.content, storage_data=places, storage_meta=StorageMeta(save_id=str(uuid.uuid4())), version=_VERSION
        )
        path.write_bytes(pickle.dumps(metadata))
        sync(path)
        for rank in range(len(self.indices)):
            _note(path.parent / part_name(rank)).unlink()
        return {**entries, self.name: entry_of(path)}


class _Counter:
    """A file that counts what is written to it."""

    def __init__(self, file: Any) -> None:
        self._file, self.count = file, 0

    def write(self, data: Any) -> int:
        self.count += memoryview(data).nbytes
        self._file.write(data)
        return memoryview(data).nbytes

    def flush(self) -> None:
        """What is below brings it to the disk at its end."""


def part_name(rank: int) -> str:
    """The name of a process's file."""
    return f"__{rank}_0.distcp"


def _note(part: Path) -> Path:
    return part.with_name(f"{part.name}.written")


def _read_note(part: Path, rank: int) -> Any:
    try:
        return json.loads(_note(part).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{part} was written by rank {rank}, but is not there: a checkpoint in parts needs a folder that all machines "
            "share. Save to such a folder, or with state_dict_type='FULL_STATE_DICT'."
        ) from None
