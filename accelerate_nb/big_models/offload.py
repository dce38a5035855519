"""Weights that stay in files until they are needed."""

import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from accelerate_nb.big_models.tensors import Device, as_device
from accelerate_nb.errors import CheckpointError, ConfigurationError
from accelerate_nb.runtime.checkpoints.writer import write_file

# What `accelerate.utils.offload` offers.
__all__ = [
    "OffloadedWeightsLoader", "PrefixedDataset", "extract_submodules_state_dict", "load_offloaded_weight",
    "offload_state_dict", "offload_weight", "save_offload_index",
]  # fmt: skip

T = TypeVar("T")
Folder = str | os.PathLike[str]

INDEX = "index.json"


def offload_weight(
    weight: Tensor, weight_name: str, offload_folder: Folder, index: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """
    Write a tensor's bytes into `<weight_name>.dat` of a folder, whole or not at all; `index` gets its dtype and shape.

    The index is returned. The file is what numpy calls raw, in the order of C; Accelerate reads and writes the same.
    """
    if index is not None:
        index[weight_name] = {"dtype": str(weight.dtype).removeprefix("torch."), "shape": list(weight.shape)}
    content = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    # numpy, by which Accelerate reads the file, can't map one of no bytes
    write_file(Path(offload_folder, f"{weight_name}.dat"), lambda file: file.write(content.data or b"\0"))
    return index


def load_offloaded_weight(weight_file: Folder, weight_info: Mapping[str, Any]) -> Tensor:
    """
    The tensor in a file that `offload_weight` wrote; its bytes are read when they are used.

    Raises a `CheckpointError` for a file that is missing or has another size than its dtype and shape need.
    """
    dtype, shape = getattr(torch, weight_info["dtype"]), tuple(weight_info["shape"])
    count = torch.Size(shape).numel()
    path = Path(weight_file)
    found = path.stat().st_size if path.is_file() else None
    # the file of an empty tensor has some bytes all the same
    if found is None or (found != count * dtype.itemsize and count):
        has = "is not there" if found is None else f"has {found} bytes"
        raise CheckpointError(
            f"{path} should hold a tensor {list(shape)} of {weight_info['dtype']}, {count * dtype.itemsize} bytes, but it "
            f"{has}. Delete the folder, so that the weights are written again."
        )
    if not count:
        return torch.empty(shape, dtype=dtype)
    # a private map: what is written to the tensor stays in memory, and a file that is replaced stays readable
    return torch.from_file(str(path), shared=False, size=count, dtype=dtype).reshape(shape)


def save_offload_index(index: Mapping[str, Any] | None, offload_folder: Folder | None) -> None:
    """Add these weights to the index of a folder; the file is replaced whole, when all that it names is written."""
    if index and offload_folder is not None:
        _write_index({**_known(offload_folder), **index}, offload_folder)


def forget(names: Collection[str], folder: Folder) -> None:
    """Take weights out of a folder's index before they are rewritten: a death in between leaves none, not old among new ones."""
    known = _known(folder)
    if not known.keys().isdisjoint(names):
        _write_index({name: entry for name, entry in known.items() if name not in names}, folder)


def _known(folder: Folder) -> dict[str, Any]:
    return read_offload_index(folder) if Path(folder, INDEX).is_file() else {}


def _write_index(index: Mapping[str, Any], folder: Folder) -> None:
    text = json.dumps(index, indent=2)
    write_file(Path(folder, INDEX), lambda file: file.write(text.encode()))


def read_offload_index(folder: Folder) -> dict[str, Any]:
    """The index of a folder of offloaded weights: the dtype and shape of each, or the safetensors file it is in."""
    path = Path(folder, INDEX)
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no {INDEX}, so it is no folder of offloaded weights, or was not finished. "
            "Offload the model into it again."
        ) from None
    except ValueError as error:
        raise CheckpointError(
            f"{path} should be an index in JSON, but is damaged: {error}. Delete the folder."
        ) from None
    if not isinstance(index, dict):
        raise CheckpointError(f"{path} should name weights, but holds a {type(index).__name__}. Delete the folder.")
    return index


def offload_state_dict(save_dir: Folder, state_dict: Mapping[str, Tensor]) -> None:
    """Write every tensor of a state dict into a folder, with an index that names them."""
    Path(save_dir).mkdir(parents=True, exist_ok=True)
    forget(set(state_dict), save_dir)
    index: dict[str, Any] = {}
    for name, tensor in state_dict.items():
        offload_weight(tensor, name, save_dir, index)
    save_offload_index(index, save_dir)


@dataclass(eq=False, repr=False)
class PrefixedDataset(Mapping[str, T]):
    """The part of a mapping whose names begin with a prefix, under their names without it."""

    dataset: Mapping[str, T]
    prefix: str

    def __getitem__(self, key: str) -> T:
        return self.dataset[f"{self.prefix}{key}"]

    def __iter__(self) -> Iterator[str]:
        return (key.removeprefix(self.prefix) for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class OffloadedWeightsLoader(Mapping[str, Tensor]):
    """
    Weights by name, from memory where `state_dict` has them, else from the files in `index`.

    The index is that of `save_folder` unless one is given; an entry may name a safetensors file instead of a dtype and a
    shape. Tensors of such files come to `device`.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Tensor] | None = None,
        save_folder: Folder | None = None,
        index: Mapping[str, Any] | None = None,
        device: Device | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ConfigurationError(
                "Need either a `state_dict`, a `save_folder` or an `index` containing offloaded weights. None was given."
            )
        self.state_dict = {} if state_dict is None else state_dict
        self.save_folder = save_folder
        if index is None:
            index = {} if save_folder is None else read_offload_index(save_folder)
        self.index = index
        self.all_keys = list(dict.fromkeys([*self.state_dict, *self.index]))
        self.device = device

    def __getitem__(self, key: str) -> Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        entry = self.index[key]
        path, name = entry.get("safetensors_file"), entry.get("weight_name", key)
        if path is None:
            if self.save_folder is None:
                raise CheckpointError(
                    f"{key} should be in a folder of offloaded weights, but none was given. Pass the folder with the index."
                )
            return load_offloaded_weight(Path(self.save_folder, f"{key}.dat"), entry)
        try:
            with safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} should hold {name!r}, but: {error}. Write or download the file again."
            ) from None
        dtype = getattr(torch, entry["dtype"]) if "dtype" in entry else tensor.dtype
        return tensor.to(dtype=dtype, device=as_device("cpu" if self.device is None else self.device))

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)


def extract_submodules_state_dict(state_dict: Mapping[str, T], submodule_names: Collection[str]) -> dict[str, T]:
    """The entries of a state dict that belong to these modules; `h.1` is not taken for `h.10`."""
    return {
        key: value
        for name in submodule_names
        for key, value in state_dict.items()
        if not name or key == name or key.startswith(f"{name}.")
    }
