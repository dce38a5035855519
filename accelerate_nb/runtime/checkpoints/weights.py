"""A model's weights as files, in the shape that Accelerate and transformers read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save as to_bytes
from torch import Tensor

from accelerate_nb.errors import CheckpointError, ConfigurationError
from accelerate_nb.runtime.checkpoints import names
from accelerate_nb.runtime.checkpoints.folders import write_file

_UNITS = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3, "TIB": 2**40, "GIB": 2**30, "MIB": 2**20, "KIB": 2**10}
_WEIGHT_FILE = re.compile(
    r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
    r"|pytorch_model(-\d{5}-of-\d{5})?\.bin|pytorch_model\.bin\.index\.json"
)


def save_weights(state: Mapping[str, Any], path: Path, *, safe: bool) -> None:
    """Write one file of weights, with safetensors or as torch's own pickle."""
    if safe:
        content = to_bytes(without_aliases(state), metadata={"format": "pt"})
        write_file(path, lambda file: file.write(content))
    else:
        write_file(path, lambda file: torch.save(dict(state), file))


def load_weights(folder: Path, index: int, device: str = "cpu") -> dict[str, Any]:
    """The weights of a checkpoint's model number `index`, whichever of the two kinds of file it has."""
    safe = folder / names.weights(index, safe=True)
    if safe.exists():
        return load_file(safe, device=device)
    pickled = folder / names.weights(index, safe=False)
    if not pickled.exists():
        raise CheckpointError(
            f"{folder} holds no weights for model {index}: neither {safe.name} nor {pickled.name}. "
            "Prepare the same models as when it was saved."
        )
    state: dict[str, Any] = torch.load(pickled, map_location=device, weights_only=True)
    return state


def save_model_files(state: Mapping[str, Any], folder: Path, max_shard_size: int | str, *, safe: bool) -> None:
    """Write a model's weights in as many files as their size asks for, in place of all weights that lie there."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = without_aliases(state) if safe else dict(state)
    base, ending = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    shards = split(tensors, parse_size(max_shard_size))
    files = _names(base, ending, len(shards))
    for name, shard in zip(files, shards, strict=True):
        save_weights(shard, folder / name, safe=safe)
    written = set(files)
    if len(shards) > 1:
        index = f"{base}.{ending}.index.json"
        _write_index(folder / index, files, shards)
        written.add(index)
    # a loader prefers one kind of file over the other, so weights of a former save would come back as the newer ones
    for each in folder.iterdir():
        if _WEIGHT_FILE.fullmatch(each.name) and each.name not in written:
            each.unlink()


def split(tensors: Mapping[str, Any], limit: int) -> list[dict[str, Any]]:
    """The tensors in their order, in groups of at most `limit` bytes; a larger tensor is alone."""
    shards: list[dict[str, Any]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        needed = _bytes(tensor)
        if shards[-1] and size + needed > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += needed
    return shards


def parse_size(size: int | str) -> int:
    """A number of bytes, from a number or from text such as "10GB"."""
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*(\d+)\s*([A-Za-z]+)\s*", size)
    if match is None or match[2].upper() not in _UNITS:
        raise ConfigurationError(
            f"max_shard_size={size!r} is not a size. Write a number of bytes, or text such as '5GB' with one of the units "
            f"{', '.join(_UNITS)}."
        )
    return int(match[1]) * _UNITS[match[2].upper()]


def without_aliases(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors, each under its first name only; parts of one memory become memories of their own, as safetensors asks."""
    seen: set[tuple[Any, ...]] = set()
    storages: set[int] = set()
    kept: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if _memory(tensor) in seen and tensor.numel():
            continue
        seen.add(_memory(tensor))
        storage = tensor.untyped_storage().data_ptr()
        kept[name] = tensor.clone().contiguous() if storage in storages else tensor.contiguous()
        storages.add(storage)
    return kept


def with_aliases(loaded: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The loaded weights for a model whose state is `own`: names fitted to it, tied weights under all their names."""
    fitted = _fit_names(loaded, own)
    first = {_memory(tensor): name for name, tensor in own.items() if name in fitted and isinstance(tensor, Tensor)}
    for name, tensor in own.items():
        if name not in fitted and isinstance(tensor, Tensor) and _memory(tensor) in first:
            fitted[name] = fitted[first[_memory(tensor)]]
    return fitted


def _fit_names(loaded: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Data parallel models save their weights as `module.…`; the model inside doesn't know that word."""
    prefix = "module."
    if all(name.startswith(prefix) for name in loaded) and not all(name.startswith(prefix) for name in own):
        return {name.removeprefix(prefix): tensor for name, tensor in loaded.items()}
    return dict(loaded)


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def _names(base: str, ending: str, count: int) -> list[str]:
    if count == 1:
        return [f"{base}.{ending}"]
    return [f"{base}-{number:05d}-of-{count:05d}.{ending}" for number in range(1, count + 1)]


def _write_index(path: Path, files: list[str], shards: list[dict[str, Any]]) -> None:
    index = {
        "metadata": {"total_size": sum(_bytes(tensor) for shard in shards for tensor in shard.values())},
        "weight_map": {key: name for name, shard in zip(files, shards, strict=True) for key in shard},
    }
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    write_file(path, lambda file: file.write(text.encode()))
