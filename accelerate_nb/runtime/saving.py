"""How an object is written to a file once, by one process of a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from accelerate_nb.runtime.checkpoints.folders import write_file
from accelerate_nb.runtime.checkpoints.weights import save_weights
from accelerate_nb.runtime.process import PartialState


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """
    Write an object on the main process, or on the first of each machine; a path gets the whole file or none.

    `f` is a path or an open file; `safe_serialization` writes a dictionary of tensors with safetensors.
    """
    state = PartialState()
    if not (state.is_local_main_process if save_on_each_node else state.is_main_process):
        return
    if not isinstance(f, (str, os.PathLike)):
        torch.save(obj, f)
    elif safe_serialization:
        save_weights(obj, Path(f), safe=True)
    else:
        write_file(Path(f), lambda file: torch.save(obj, file))


def wait_for_everyone() -> None:
    """Wait until every process has come here."""
    PartialState().wait_for_everyone()
