"""The files of an engine's checkpoint, under the names that Accelerate gives them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from accelerate_nb.errors import CheckpointError
from accelerate_nb.runtime.checkpoints import file_names
from accelerate_nb.runtime.checkpoints.load_file import LoadedFile, SharedSetting, read
from accelerate_nb.runtime.checkpoints.writer import FileToWrite, VerbatimFile
from accelerate_nb.runtime.strategies.deepspeed import universal
from accelerate_nb.runtime.world.world import World

_EXPECTED = "a part of DeepSpeed's engine"


def tag_of(index: int) -> str:
    """The folder of a model's engine."""
    return f"{file_names.MODEL_NAME}_{index}" if index else file_names.MODEL_NAME


class _Collector:
    """
    An engine's way to its files, which keeps what is saved, for a writer that brings all of a checkpoint to the disk or nothing.

    What is loaded is read as data, never as code; `read_before` has the content of files that were read already.
    """

    def __init__(self, original: Any, read_before: Mapping[Path, Any] | None = None) -> None:
        self._original = original
        self._read_before = read_before or {}
        self.saved: dict[Path, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def commit(self, _info: Any) -> bool:
        """The writer commits."""
        return True

    def save(self, state_dict: Any, path: str) -> None:
        """Keep a file's content."""
        self.saved[Path(path)] = state_dict

    def load(self, path: str, map_location: Any = None) -> Any:
        """The content of a file."""
        found = Path(path)
        return self._read_before[found] if found in self._read_before else read_part(found, map_location)


@contextmanager
def _collecting(engine: Any, read_before: Mapping[Path, Any] | None = None) -> Iterator[_Collector]:
    before, engine.checkpoint_engine = engine.checkpoint_engine, _Collector(engine.checkpoint_engine, read_before)
    try:
        yield engine.checkpoint_engine
    finally:
        engine.checkpoint_engine = before


def files(models: Sequence[Any]) -> list[FileToWrite]:
    """The files of this process for its engines; all processes call it."""
    found: list[FileToWrite] = []
    for index, engine in _engines(models):
        with TemporaryDirectory() as folder, _collecting(engine) as collector:
            engine.save_checkpoint(folder, tag_of(index))
            root = Path(folder)
            found += [FileToWrite(str(path.relative_to(root)), content) for path, content in collector.saved.items()]
            # which of several is the newest, and DeepSpeed's scripts
            found += [
                VerbatimFile(str(path.relative_to(root)), path.read_bytes())
                for path in sorted(root.rglob("*"))
                if path.is_file()
            ]
    return found


def load(world: World, folder: Path, models: Sequence[Any], options: Mapping[str, Any]) -> list[LoadedFile]:
    """
    The states of engines; by another number of processes they go through DeepSpeed's universal form. All processes call it.

    `options` are those of the engine's `load_checkpoint`.
    """
    return [_load(world, folder, index, engine, options) for index, engine in _engines(models)]


def _load(world: World, folder: Path, index: int, engine: Any, options: Mapping[str, Any]) -> LoadedFile:
    tag = tag_of(index)
    if not (folder / tag).is_dir():
        raise CheckpointError(
            f"{folder / tag} does not exist, and {_EXPECTED} was expected there. Load a folder that was saved with DeepSpeed, or "
            "train without it."
        )
    states = {path: read_part(path) for path in _files_of(engine, folder / tag)}
    weights = next((state for path, state in states.items() if path.name.endswith("model_states.pt")), None)
    if weights is None:
        raise CheckpointError(
            f"{folder / tag} holds no states of a model, and {_EXPECTED} was expected there. Load another checkpoint."
        )
    saved_by = int(weights["dp_world_size"])
    is_otherwise = engine.zero_optimization() and saved_by != engine.seq_dp_world_size

    def receive(content: dict[Path, Any]) -> None:
        if is_otherwise:
            with universal.converted(world, folder, tag) as other, universal.expected_by(engine), _collecting(engine):
                engine.load_checkpoint(str(other), tag, **options)
        else:
            with _collecting(engine, content):
                engine.load_checkpoint(str(folder), tag, **options)

    return LoadedFile(folder / tag, f"the engine of model {index}", states, receive)


def _files_of(engine: Any, folder: Path) -> list[Path]:
    """The files that this process reads, as far as they are there; all of them where another number of processes wrote them."""
    own = f"zero_pp_rank_{engine.global_rank}_"
    found = sorted(folder.glob("*_states.pt"))
    parts = [path for path in found if "zero_pp_rank_" in path.name]
    return [path for path in found if path not in parts or own in path.name] or found[:1]


def _engines(models: Sequence[Any]) -> list[tuple[int, Any]]:
    """The models that are engines, by their numbers; one that is only evaluated is none."""
    return [(index, model) for index, model in enumerate(models) if hasattr(model, "save_checkpoint")]


def read_part(path: Path, map_location: Any = None) -> Any:
    """The content of one of an engine's files."""
    with _harmless.block():
        return read(path, _EXPECTED, map_location=map_location or "cpu")


def _known() -> Any:
    """The types that an engine saves beside tensors."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return torch.serialization.safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address])


_harmless = SharedSetting(_known)
