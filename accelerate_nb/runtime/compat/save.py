"""Objects written to a file once, by one process of a run, and read back."""

import codecs
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as to_bytes
from torch import Tensor

from accelerate_nb.runtime.checkpoints.host_copy import brought, is_apart, settle
from accelerate_nb.runtime.checkpoints.load_file import harmless, numpy_state, shared_setting
from accelerate_nb.runtime.checkpoints.writer import without_aliases, write_file
from accelerate_nb.runtime.operations.nested import send_to_device
from accelerate_nb.runtime.world.state import PartialState

# What `accelerate.utils.other` offers.
__all__ = ["TORCH_SAFE_GLOBALS", "clean_state_dict_for_safetensors", "load", "save", "wait_for_everyone"]

# What numpy's arrays and the states of random generators are made of when they are unpickled: numbers, no code.
TORCH_SAFE_GLOBALS: list[Any] = [
    *(np.empty(0).__reduce__()[0], np.ndarray, codecs.encode, np.dtype, np.dtypes.UInt32DType)
]
_also_harmless = shared_setting(
    lambda: torch.serialization.safe_globals([item for item in TORCH_SAFE_GLOBALS if item not in numpy_state()])
)


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """
    Write an object on the main process, or on the first of each machine; a path gets the whole file or none.

    `f` is a path or an open file; `safe_serialization` writes a dictionary of tensors with safetensors.
    """
    state = PartialState()
    settle(obj)
    if not (state.is_local_main_process if save_on_each_node else state.is_main_process):
        return
    obj = brought(obj)
    if not isinstance(f, (str, os.PathLike)):
        torch.save(obj, f)
    elif safe_serialization:
        tensors = clean_state_dict_for_safetensors(obj) if isinstance(obj, Mapping) else obj  # which is an error
        content = to_bytes(tensors, metadata={"format": "pt"})
        write_file(Path(f), lambda file: file.write(content))
    else:
        write_file(Path(f), lambda file: torch.save(obj, file))


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """
    The object that `torch.load` reads from a path or an open file; numpy's arrays are taken for safe.

    Nothing but numbers and plain containers is unpickled, unless `weights_only=False` trusts the file. To an XLA
    device, which torch can't read to, tensors go by way of the CPU.
    """
    if isinstance(map_location, (str, torch.device)) and is_apart(torch.device(map_location)):
        return send_to_device(load(f, map_location="cpu", **kwargs), torch.device(map_location))
    with harmless(), _also_harmless():
        return torch.load(f, map_location=map_location, **{"weights_only": True, **kwargs})


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A model's weights as safetensors takes them: each tensor under its first name only, and contiguous."""
    tensors = {name: value for name, value in state_dict.items() if isinstance(value, Tensor)}
    kept = without_aliases(tensors)
    return {name: kept.get(name, value) for name, value in state_dict.items() if name in kept or name not in tensors}


def wait_for_everyone() -> None:
    """Wait until every process has called this."""
    PartialState().wait_for_everyone()
