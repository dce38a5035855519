"""An engine's complete weights, and the files of its checkpoint under the names that Accelerate gives them."""

import itertools
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from accelerate_nb.errors import CheckpointError
from accelerate_nb.runtime.checkpoints import file_names
from accelerate_nb.runtime.checkpoints.load_file import LoadedFile, read, shared_setting
from accelerate_nb.runtime.checkpoints.writer import FileToWrite, VerbatimFile
from accelerate_nb.runtime.operations.collective import gather_object
from accelerate_nb.runtime.world.world import World


def is_in_parts(weight: Any) -> bool:
    """Whether a weight is one of stage 3's."""
    return hasattr(weight, "ds_id")


def complete_state(model: Module, *, is_kept: bool) -> dict[str, Any]:
    """Complete weights and buffers by name, on the CPU where they are in parts; whole one module at a time. All processes call it."""
    from deepspeed.runtime.zero import GatheredParameters

    if not any(map(is_in_parts, model.parameters())):
        return model.state_dict()
    own = model.state_dict(keep_vars=True)
    found: dict[str, Any] = {}
    for _, group in itertools.groupby(own, lambda name: name.rpartition(".")[0]):
        names = list(group)
        weights = [own[name] for name in names]
        with GatheredParameters(weights):
            if is_kept:
                for name, weight in zip(names, weights, strict=True):
                    value = weight.detach() if isinstance(weight, Tensor) else weight
                    found[name] = value.cpu().clone() if is_in_parts(weight) else value
    return {name: found[name] for name in own if name in found}


_EXPECTED = "a part of DeepSpeed's engine"


def tag_of(index: int) -> str:
    """The folder of a model's engine."""
    return f"{file_names.MODEL_NAME}_{index}" if index else file_names.MODEL_NAME


@dataclass(eq=False)
class _Collector:
    """An engine's way to its files: keeps what is saved for the checkpoint's writer, and reads data, never code."""

    _original: Any
    _read_before: Mapping[Path, Any]
    saved: dict[Path, Any] = field(default_factory=dict)

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
    before, engine.checkpoint_engine = engine.checkpoint_engine, _Collector(engine.checkpoint_engine, read_before or {})
    try:
        yield engine.checkpoint_engine
    finally:
        engine.checkpoint_engine = before


def files(models: Sequence[Any], options: Mapping[str, Any]) -> list[FileToWrite]:
    """The files of this process for its engines; all processes call it; `options` are of their `save_checkpoint`."""
    found: list[FileToWrite] = []
    for index, engine in _engines(models):
        with TemporaryDirectory() as folder, _collecting(engine) as collector:
            engine.save_checkpoint(folder, tag_of(index), **options)
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
    """The states of engines, by other numbers of processes in DeepSpeed's universal form; `options` are of its `load_checkpoint`."""
    return [_load(world, folder, index, engine, options) for index, engine in _engines(models)]


def _load(world: World, folder: Path, index: int, engine: Any, options: Mapping[str, Any]) -> LoadedFile:
    tag = tag_of(index)
    if not (folder / tag).is_dir():
        raise CheckpointError(
            f"{folder / tag} does not exist, and {_EXPECTED} was expected there. Load a folder that was saved with DeepSpeed, or "
            "train without it."
        )
    # what this process reads, as far as it is there; all of it where another number of processes wrote it
    found = sorted((folder / tag).glob("*_states.pt"))
    own = f"zero_pp_rank_{engine.global_rank}_"
    needed = [path for path in found if "zero_pp_rank_" not in path.name or own in path.name] or found[:1]
    states = {path: read_part(path) for path in needed}
    weights = next((state for path, state in states.items() if path.name.endswith("model_states.pt")), None)
    if weights is None:
        raise CheckpointError(
            f"{folder / tag} holds no states of a model, and {_EXPECTED} was expected there. Load another checkpoint."
        )
    is_otherwise = engine.zero_optimization() and int(weights["dp_world_size"]) != engine.seq_dp_world_size

    def receive(content: dict[Path, Any]) -> None:
        if is_otherwise:
            with _converted(world, folder, tag, engine._config) as other, _collecting(engine):
                engine.load_checkpoint(str(other), tag, **options)
        else:
            with _collecting(engine, content):
                engine.load_checkpoint(str(folder), tag, **options)

    return LoadedFile(folder / tag, f"the engine of model {index}", states, receive)


def _engines(models: Sequence[Any]) -> list[tuple[int, Any]]:
    """The engines that train, by their numbers; DeepSpeed gives one without an optimizer nothing that saves."""
    engines = enumerate(models)
    return [(index, model) for index, model in engines if getattr(model, "checkpoint_engine", None) is not None]


def read_part(path: Path, map_location: Any = None) -> Any:
    """The content of one of an engine's files."""
    with _harmless():
        return read(path, _EXPECTED, map_location=map_location or "cpu")


def _known() -> Any:
    """The types that an engine saves beside tensors."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return torch.serialization.safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address])


_harmless = shared_setting(_known)


@contextmanager
def _converted(world: World, folder: Path, tag: str, config: Any) -> Iterator[Path]:
    """A folder beside `folder` with its engine in the universal form, as which it is loaded in the block; all processes enter it."""
    other = folder.with_name(f".{folder.name}.universal")
    complaint = _convert(folder / tag, other / tag) if world.is_main else None
    before, config.load_universal_checkpoint = config.load_universal_checkpoint, True
    try:
        complaint = next((text for text in gather_object([complaint]) if text is not None), None)
        if complaint is not None:
            raise CheckpointError(complaint)
        yield other
    finally:
        config.load_universal_checkpoint = before
        world.barrier()
        if world.is_main:
            shutil.rmtree(other, ignore_errors=True)


def _convert(source: Path, target: Path) -> str | None:
    """Convert with DeepSpeed's own script; returns what went wrong."""
    shutil.rmtree(target.parent, ignore_errors=True)
    target.mkdir(parents=True)
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(source), "--output_folder", str(target)]
    command += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.returncode:
        return None
    last = (done.stderr.strip() or "it said nothing").splitlines()[-1]
    return (
        f"{source} was saved by another number of processes, and DeepSpeed could not convert it to its universal form ({last}). "
        "It converts what Adam and AdamW remember. Load it with as many processes as saved it."
    )
