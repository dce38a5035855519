"""A model's weights as files, in the shape that Accelerate and transformers read."""

import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import Module

from accelerate_nb.errors import CheckpointError, ConfigurationError, StateError
from accelerate_nb.runtime.checkpoints import file_names, writer
from accelerate_nb.runtime.checkpoints.host_copy import address, brought, storage
from accelerate_nb.runtime.checkpoints.load_file import read, read_weights
from accelerate_nb.runtime.training.repoint import original_name

_logger = logging.getLogger("accelerate_nb.utils.other")
_UNITS = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3, "TIB": 2**40, "GIB": 2**30, "MIB": 2**20, "KIB": 2**10}
_WEIGHT_FILE = re.compile(
    r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
    r"|pytorch_model(-\d{5}-of-\d{5})?\.bin|pytorch_model\.bin\.index\.json"
)


def file_of_weights(state: Mapping[str, Any], name: str, *, safe: bool) -> writer.FileToWrite:
    """A file of weights, with safetensors or as torch's own pickle."""
    return writer.FileToWrite(name, without_aliases(state) if safe else dict(state), safe)


def load_weights(folder: Path, index: int) -> tuple[Path, dict[str, Any]]:
    """The weights of a checkpoint's model number `index` with the file they come from, whichever of the two kinds it is."""
    expected = f"the weights of model {index}"
    safe = folder / file_names.weights(index, safe=True)
    if safe.exists():
        return safe, read_weights(safe, expected)
    pickled = folder / file_names.weights(index, safe=False)
    if not pickled.exists():
        raise CheckpointError(
            f"{folder} holds no weights for model {index}: neither {safe.name} nor {pickled.name}. "
            "Prepare the same models as when it was saved."
        )
    return pickled, read(pickled, expected)


def save_model_files(state: Mapping[str, Any], folder: Path, max_shard_size: int | str, *, safe: bool) -> None:
    """Write a model's weights in as many files as their size needs, in place of all weights in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    state = brought(state)
    tensors = without_aliases(state) if safe else dict(state)
    base, suffix = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    groups = writer.in_groups(tensors.items(), lambda item: writer.size_of(item[1]), parse_size(max_shard_size))
    shards = [dict(group) for group in groups] or [{}]
    files = [f"{base}-{number:05d}-of-{len(shards):05d}.{suffix}" for number in range(1, len(shards) + 1)]
    files = files if len(shards) > 1 else [f"{base}.{suffix}"]
    draft = folder / f".{base}.incomplete"
    writer.remove(draft)
    draft.mkdir()
    try:
        writer.write_files(
            [file_of_weights(shard, name, safe=safe) for name, shard in zip(files, shards, strict=True)], draft
        )
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": writer.size_of(shards)},
                "weight_map": {key: name for name, shard in zip(files, shards, strict=True) for key in shard},
            }
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            writer.write_file(draft / f"{base}.{suffix}.index.json", lambda file: file.write(text.encode()))
        written = {path.name for path in draft.iterdir()}
        for name in written:
            (draft / name).replace(folder / name)
        # a loader prefers one kind of file over the other, so weights of a former save would come back as the newer ones
        for path in folder.iterdir():
            if _WEIGHT_FILE.fullmatch(path.name) and path.name not in written:
                path.unlink()
        writer.sync(folder)
    finally:
        writer.remove(draft)


def parse_size(size: int | str) -> int:
    """A number of bytes, from a number or from text such as "10GB"; "10Gb" are bits."""
    if isinstance(size, int) and size >= 0:
        return size
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
        if _memory(tensor) in seen and tensor.numel():
            removed.add(name)
            continue
        seen.add(_memory(tensor))
        memory = storage(tensor)
        kept[name] = tensor.clone().contiguous() if memory in storages else tensor.contiguous()
        storages.add(memory)
    if removed:
        _logger.warning(
            "Removed shared tensor %s while saving: safetensors keeps each memory under one name. Loading into a model that "
            "shares them fills them in.",
            removed,
        )
    return kept


def with_aliases(loaded: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """The loaded weights for a model with this `state`: names fitted to it, tied weights under all their names."""
    # data parallel models save their weights as `module.…`, compiled parts as `_orig_mod.…`; the model inside knows neither
    prefix = "module."
    is_inside = all(name.startswith(prefix) for name in loaded) and not all(name.startswith(prefix) for name in state)
    inner = {name.removeprefix(prefix) if is_inside else name: tensor for name, tensor in loaded.items()}
    fitted = {original_name(name): tensor for name, tensor in inner.items()}
    first = {_memory(tensor): name for name, tensor in state.items() if name in fitted and isinstance(tensor, Tensor)}
    for name, tensor in state.items():
        if name not in fitted and isinstance(tensor, Tensor) and _memory(tensor) in first:
            fitted[name] = fitted[first[_memory(tensor)]]
    return fitted


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.device, address(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride()


def complete(model: Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """
    A model's state with the weights that its hooks have, on the CPU or in files, in place of those on the meta device.

    A hook that keeps weights has `offload=True` and a `weights_map` of them by their names in its module, as those of
    `dispatch_model` do here and in Accelerate. A `StateError` names a weight that no hook has.
    """
    whole = dict(state)
    if any(is_missing(value) for value in whole.values()):
        for path, module in model.named_modules(remove_duplicate=False):
            for hook in offloading_hooks(module):
                if hook.weights_map is not None:
                    _fill(whole, original_name(f"{path}." if path else ""), hook.weights_map)
    missing = [name for name, value in whole.items() if is_missing(value)]
    if missing:
        raise StateError(
            "You can't save the model since some parameters are on the meta device, and no hook has them: "
            f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}. Load them first."
        )
    return whole


def is_missing(value: Any) -> bool:
    """Whether a weight is not in this process's memory: a hook has it, or another process."""
    return isinstance(value, Tensor) and value.is_meta


def offloading_hooks(module: Module) -> Iterator[Any]:
    """The hooks that bring a module's weights for each forward, alone or among others."""
    hook: Any = getattr(module, "_hf_hook", None)
    # decided by their attributes, so that models which Accelerate has dispatched are understood too
    for item in getattr(hook, "hooks", (hook,)):
        if getattr(item, "offload", False) is True and hasattr(item, "weights_map"):
            yield item


def _fill(state: dict[str, Any], prefix: str, weights: Mapping[str, Tensor]) -> None:
    for name, value in state.items():
        if is_missing(value) and name.startswith(prefix):
            try:
                found = weights[name.removeprefix(prefix)]
            except KeyError:
                continue  # another hook's
            # a file may hold wider numbers than those that the model computes with
            state[name] = found.to(device="cpu", dtype=value.dtype)
