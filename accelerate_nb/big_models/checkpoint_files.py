"""Checkpoints of weights, found and read without running any code that they hold."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from accelerate_nb.big_models.device_map.check import covering
from accelerate_nb.big_models.devices import DISK, DeviceMap, as_device
from accelerate_nb.big_models.offload import Folder
from accelerate_nb.errors import CheckpointError, ConfigurationError
from accelerate_nb.runtime.checkpoints import file_names

_INDEXES = (file_names.SAFE_WEIGHTS_INDEX_NAME, file_names.WEIGHTS_INDEX_NAME)
_WHOLE = (file_names.SAFE_WEIGHTS_NAME, file_names.WEIGHTS_NAME)


def checkpoint_files(checkpoint: Folder) -> list[Path]:
    """
    The files of a checkpoint: a file of weights, the index of several, or a folder that holds either.

    Where a folder holds several checkpoints, the one that was written last is taken: a file that a former save left behind
    is older. Raises a `ConfigurationError` where there is none.
    """
    path = Path(checkpoint)
    if path.is_file():
        return _listed_in(path) if path.suffix == ".json" else [path]
    if not path.is_dir():
        raise ConfigurationError(
            "`checkpoint` should be the path to a file containing a whole state dict, or the index of a sharded checkpoint, "
            f"or a folder containing a sharded checkpoint or the whole state dict, but got {checkpoint}, which is not there."
        )
    chosen = _latest(path)
    return _listed_in(chosen) if chosen.suffix == ".json" else [chosen]


def _latest(folder: Path) -> Path:
    whole = [folder / name for name in _WHOLE if (folder / name).is_file()]
    indexes = sorted(path for path in folder.iterdir() if path.name.endswith(".index.json"))
    strange = [index.name for index in indexes if index.name not in _INDEXES]
    if len(indexes) > 1 and strange and not whole:
        raise ConfigurationError(
            f"{folder} containing more than one `.index.json` file, the choice is ambiguous: "
            f"{', '.join(index.name for index in indexes)}. Pass the path of one of them, or delete the irrelevant ones."
        )
    found = whole + ([] if whole and strange else indexes)
    if not found:
        raise ConfigurationError(
            f"{folder} is not a folder containing a `.index.json` file or a {file_names.WEIGHTS_NAME} or a "
            f"{file_names.SAFE_WEIGHTS_NAME} file. It holds: {', '.join(sorted(path.name for path in folder.iterdir())) or 'nothing'}."
        )
    # of equally old ones the first: safetensors
    return max(found, key=lambda item: item.stat().st_mtime_ns)


def _listed_in(index: Path) -> list[Path]:
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))
        weight_map: dict[str, str] = listed.get("weight_map", listed)
        files = sorted({index.parent / file for file in weight_map.values()})
    except (ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{index} should be an index, JSON with a `weight_map` from names to files, but is damaged or another file: "
            f"{error}. Save or download it again."
        ) from None
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise CheckpointError(
            f"{index} names files that are not beside it: {', '.join(absent)}. Save or download the checkpoint again."
        )
    return files


class _LazyTensors(Mapping[str, Tensor]):
    """The tensors of an open safetensors file, each read on access."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.names = list(file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.names:
            raise KeyError(name)
        tensor: Tensor = self.file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


@contextmanager
def open_weights(path: Path) -> Iterator[Mapping[str, Any]]:
    """
    The weights in a file by name, read on access: they are the file's memory, so keep copies.

    Raises a `CheckpointError` that names a file which is damaged, or which is no file of weights.
    """
    if path.suffix == ".safetensors":
        with open_safetensors(path) as file:
            _check_format(path, (file.metadata() or {}).get("format", "pt"))
            yield _LazyTensors(file)
    else:
        yield _state_dict_in(path)


def open_safetensors(path: Path) -> Any:
    """A safetensors file, for a `with`; `CheckpointError` where it is damaged, or another kind of file."""
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} should be a safetensors file, but is damaged, or another kind of file: {error}. "
            "Save or download it again."
        ) from None


def _check_format(path: Path, found: str) -> None:
    if found != "pt":
        raise CheckpointError(
            f"{path} was saved with the format {found!r} of another framework, and weights of torch, 'pt', are expected. "
            "Save it with torch, or convert it."
        )


def load_pickled(path: Path) -> Any:
    """The content of a file that torch.save wrote, read into memory on use; `CheckpointError` where it is damaged or no data."""
    try:
        # only the format of today can be mapped; that of torch 1.5 is no zip file
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path) or None)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path} should hold a state dict written by torch.save, but is damaged, or holds objects other than tensors, "
            f"which are not read since they could run code: {str(error).splitlines()[0] if str(error) else 'it is empty'}. "
            "Save it again from `model.state_dict()`, or download it again."
        ) from None


def _state_dict_in(path: Path) -> Mapping[str, Any]:
    content = load_pickled(path)
    if not isinstance(content, Mapping) or not any(isinstance(item, Tensor) for item in content.values()):
        held = f"a mapping of {list(content)[:5]}" if isinstance(content, Mapping) else f"a {type(content).__name__}"
        raise CheckpointError(
            f"{path} should hold a state dict, names with tensors, but holds {held}. Save `model.state_dict()` itself."
        )
    return content


def load_state_dict(checkpoint_file: Folder, device_map: DeviceMap | None = None) -> dict[str, Any]:
    """
    The tensors of one file of weights, of safetensors or of torch.save; each on the device that `device_map` has for it.

    What the map leaves out, or has on disk, is on the CPU. No code in the file is run.
    """
    with open_weights(Path(checkpoint_file)) as weights:
        return {name: _placed(name, weights[name], device_map) for name in weights}


def _placed(name: str, tensor: Any, device_map: DeviceMap | None) -> Any:
    if not isinstance(tensor, Tensor):
        return tensor
    found = None if device_map is None else covering(name, device_map)
    device = "cpu" if device_map is None or found is None else device_map[found]
    target = torch.device("cpu") if device == DISK else as_device(device)
    # a tensor that is still the file's own memory would change, or crash, when the file is rewritten
    return tensor.clone() if target.type == "cpu" else tensor.to(target)
