"""The merge of a checkpoint in shards into one file of weights."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from accelerate_nb.errors import CheckpointError, ConfigurationError
from accelerate_nb.runtime.checkpoints import file_names
from accelerate_nb.runtime.checkpoints.dcp.index import LIST, Position, ShardIndex, list_shards
from accelerate_nb.runtime.checkpoints.io.safetensors_writer import can_hold, layout, write_numbers
from accelerate_nb.runtime.checkpoints.io.writer import in_groups, named, size_of, write_file
from accelerate_nb.runtime.world.state import PartialState
from accelerate_nb.user_warnings import warn_user

# So many bytes of weights are in memory at a time; a larger tensor is alone.
_AT_ONCE = 256 << 20


@dataclass(frozen=True, slots=True)
class MergeResult:
    """The written file, the number of its tensors and bytes, and the parts that were left out."""

    path: Path
    shards: Path
    tensors: int
    bytes: int
    left_out: tuple[str, ...] = ()
    removed: bool = False


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """
    Make one file of a checkpoint's shards: `model.safetensors` in the folder `output_path`, or else `pytorch_model.bin`.

    Shards are what FSDP saves with `SHARDED_STATE_DICT`, and whatever else torch.distributed.checkpoint writes. The main
    process does it, and the others wait. The shards are removed only after the file was compared with them.

    >>> merge_fsdp_weights("checkpoint/pytorch_model_fsdp_0", "merged")
    """
    state = PartialState()
    try:
        if state.is_main_process:
            merge(checkpoint_dir, output_path, safe=safe_serialization, removes=remove_checkpoint_dir)
    finally:
        state.wait_for_everyone()


def merge(
    checkpoint: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    safe: bool = True,
    replaces: bool = True,
    removes: bool = False,
) -> MergeResult:
    """
    Make one file of a checkpoint's shards in the folder `output`, whole or not at all; with `removes`, delete the shards.

    A safetensors file is written piece by piece, so that the weights need not fit in memory. `ConfigurationError` says that
    the folders are not what they should be, or, without `replaces`, that the file is there already; `CheckpointError` that
    shards are missing or damaged, or that the file could not be written.
    """
    shards = list_shards(checkpoint)
    path = _output_path(
        Path(output), file_names.SAFE_WEIGHTS_NAME if safe else file_names.WEIGHTS_NAME, replaces=replaces
    )
    if removes and path.resolve() in {file.resolve() for file in (*shards.files, shards.folder / LIST)}:
        raise ConfigurationError(f"{path} is one of the shards, which were to be removed. Pass another folder.")
    keys, left_out = _safe_names(shards) if safe else ({}, ())
    size = sum(size_of(tensor) for key, tensor in shards.tensors.items() if not safe or key in keys.values())
    with named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_space(path, size)
    with named(path, (OSError, RuntimeError, ValueError, SafetensorError)):
        if safe:
            write_file(path, lambda file: _write_safe(file, shards, keys, compares=removes))
        else:
            write_file(path, lambda file: _write_pickled(file, shards, compares=removes))
    if removes:
        _remove(shards)
    return MergeResult(path, shards.folder, len(keys or shards.tensors), size, left_out, removes)


def _output_path(folder: Path, name: str, *, replaces: bool) -> Path:
    folder = folder.expanduser()
    path = folder / name
    if folder.is_file() or (not folder.is_dir() and folder.suffix in {".safetensors", ".bin", ".pt"}):
        raise ConfigurationError(
            f"The weights were to be written to {folder}, which should be a folder. Pass {folder.parent}: "
            f"the file in it is called {name}."
        )
    if path.exists() and not replaces:
        raise ConfigurationError(f"{path} is there already. Pass another folder, or have it replaced with --overwrite.")
    return path


def _check_space(path: Path, size: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if free < size:
        raise CheckpointError(
            f"{path.name} takes {size / 1e9:.2f} GB, and {path.parent} has {free / 1e9:.2f} GB left. "
            "Make space, or pass a folder on another disk."
        )


def _safe_names(shards: ShardIndex) -> tuple[dict[str, str], tuple[str, ...]]:
    """The name that each tensor of the weights gets, with its key among the shards; and what is beside the weights."""
    prefix, others = weights_among(shards.positions)
    keys: dict[str, str] = {}
    for key, position in shards.positions.items():
        if position[: len(prefix)] != prefix:
            continue
        tensor = shards.tensors.get(key)
        if tensor is None or not can_hold(tensor.dtype):
            held = "what is no tensor" if tensor is None else f"numbers of type {tensor.dtype}"
            raise CheckpointError(
                f"{shards.folder} holds {held} under {key!r}, which safetensors can't hold. "
                "Write torch's own format, with safe_serialization=False or --unsafe."
            )
        keys[".".join(map(str, position[len(prefix) :]))] = key
    return keys, others


def weights_among(positions: Mapping[str, Position]) -> tuple[Position, tuple[str, ...]]:
    """The key of the weights, if there is one, and the keys beside it."""
    tops = {str(position[0]): len(position) > 1 for position in positions.values()}
    if len(tops) == 1:
        (word, is_nested) = next(iter(tops.items()))
        return ((word,) if is_nested else ()), ()
    if tops.get("model"):
        return ("model",), tuple(sorted(word for word in tops if word != "model"))
    return (), ()


def _write_safe(file: BinaryIO, shards: ShardIndex, keys: Mapping[str, str], *, compares: bool) -> None:
    begin, names = layout({name: shards.tensors[key] for name, key in keys.items()})
    file.write(begin)
    groups = list(in_groups(names, lambda name: size_of(shards.tensors[keys[name]]), _AT_ONCE))
    for group in groups:
        loaded = shards.load(keys[name] for name in group)
        for name in group:
            write_numbers(loaded[keys[name]], file)
    file.flush()
    with safe_open(Path(file.name), framework="pt") as written:
        assert set(written.keys()) == set(keys), "the file has the names that its beginning lists"
        for group in groups if compares else ():
            loaded = shards.load(keys[name] for name in group)
            for name in group:
                _compare(name, written.get_tensor(name), loaded[keys[name]])


def _write_pickled(file: BinaryIO, shards: ShardIndex, *, compares: bool) -> None:
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict

    nested: Any = unflatten_state_dict(shards.load(shards.positions), shards.positions)
    if len(nested) == 1 and isinstance(only := next(iter(nested.values())), dict):
        nested = only
    torch.save(nested, file)
    if compares:
        file.flush()
        written, _ = flatten_state_dict(torch.load(Path(file.name), weights_only=True, mmap=True))
        for name, value in flatten_state_dict(nested)[0].items():
            _compare(name, written[name], value)


def _compare(name: str, written: Any, expected: Any) -> None:
    """Raise where what was written is not, bit for bit, what the shards hold."""
    if isinstance(expected, Tensor):
        same = written.dtype == expected.dtype and written.shape == expected.shape
        same = same and torch.equal(_bits(written), _bits(expected))
    else:
        same = written == expected
    if not same:
        raise CheckpointError(f"{name} reads otherwise than it was written. See whether the disk is sound.")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _remove(shards: ShardIndex) -> None:
    """Delete the shards, and their folder where nothing else is in it."""
    # without its list a checkpoint is none, so a kill in between leaves nothing that could be taken for one
    (shards.folder / LIST).unlink()
    for path in shards.files:
        path.unlink()
    left = sorted(item.name for item in shards.folder.iterdir())
    if left:
        warn_user(f"{shards.folder} stays, since other files are in it: {', '.join(left[:5])}")
    else:
        shards.folder.rmdir()
