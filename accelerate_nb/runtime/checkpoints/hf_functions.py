"""Accelerate's functions for the parts of a checkpoint, for those who call them one by one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from accelerate_nb.runtime.checkpoints import file_names
from accelerate_nb.runtime.checkpoints.checkpoint import rank_files
from accelerate_nb.runtime.checkpoints.io.writer import FileToWrite, files_of, write_files
from accelerate_nb.runtime.checkpoints.load_file import device_of, fitting, loaded_into, read, read_states
from accelerate_nb.runtime.checkpoints.rng_state import restore_random_states
from accelerate_nb.runtime.checkpoints.weights import file_of_weights, load_weights, with_aliases
from accelerate_nb.runtime.training.repoint import load_original_state, original_state
from accelerate_nb.runtime.training.unwrap import extract_model_from_parallel
from accelerate_nb.runtime.world.state import PartialState


def save_accelerator_state(
    output_dir: str | os.PathLike[str],
    model_states: Sequence[Mapping[str, Any]],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    step: int,
    scaler: torch.amp.GradScaler | None = None,
    save_on_each_node: bool = False,
    safe_serialization: bool = True,
) -> Path:
    """
    Write these states to a folder, as they come: shared ones on the main process, its own on each; returns the folder.

    It is what `Accelerator.save_state` is made of, without its draft: a kill leaves some of the files.
    """
    folder, state = Path(output_dir), PartialState()
    folder.mkdir(parents=True, exist_ok=True)
    files: list[FileToWrite] = []
    if state.is_local_main_process if save_on_each_node else state.is_main_process:
        files += [
            file_of_weights(weights, file_names.weights(index, safe=safe_serialization), safe=safe_serialization)
            for index, weights in enumerate(model_states)
        ]
        files += files_of(file_names.OPTIMIZER_NAME, optimizers) + files_of(file_names.SCHEDULER_NAME, schedulers)
        if scaler is not None:
            files.append(FileToWrite(file_names.SCALER_NAME, scaler.state_dict()))
    write_files(files + rank_files(process_index, step, dataloaders), folder)
    return folder


def load_accelerator_state(
    input_dir: str | os.PathLike[str],
    models: Sequence[Any],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    scaler: torch.amp.GradScaler | None = None,
    map_location: str | None = None,
    load_kwargs: Mapping[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> dict[str, Any]:
    """Read what `save_accelerator_state` wrote, here or with Accelerate; returns the `Accelerator`'s attributes to be set."""
    folder = Path(input_dir)
    options = {"map_location": device_of(map_location, PartialState().device), **(load_kwargs or {})}
    for index, model in enumerate(models):
        path, loaded = load_weights(folder, index)
        inner = extract_model_from_parallel(model)
        with fitting(path, f"the weights of model {index}"):
            load_original_state(inner, with_aliases(loaded, original_state(inner)), **load_model_func_kwargs)
    found = read_states(folder, file_names.OPTIMIZER_NAME, optimizers, options)
    found += read_states(folder, file_names.SCHEDULER_NAME, schedulers, options)
    if scaler is not None:
        found.append(loaded_into(scaler, folder / file_names.SCALER_NAME, "the state of the gradient scaler", {}))
    for item in found:
        item.give()
    positions = folder / file_names.of_rank(file_names.POSITIONS_NAME, process_index)
    if positions.exists():
        resumable = [loader for loader in dataloaders if hasattr(loader, "resume")]
        for loader, position in zip(resumable, read(positions, "the positions of the loaders"), strict=False):
            loader.resume(position)
    states = read(
        folder / file_names.of_rank(file_names.RNG_STATE_NAME, process_index), "the random states of a process"
    )
    restore_random_states(states)
    return {"step": states["step"]} if "step" in states else {}


def save_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0, save_on_each_node: bool = False) -> None:
    """Write the state of an object to `custom_checkpoint_{index}.pkl` in a folder, on the main process."""
    state = PartialState()
    if state.is_local_main_process if save_on_each_node else state.is_main_process:
        write_files([FileToWrite(f"{file_names.CUSTOM_NAME}_{index}.pkl", obj.state_dict())], Path(path))


def load_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0) -> None:
    """Give an object the state that `save_custom_state` wrote; only plain values and tensors are made of it."""
    file = Path(path) / f"{file_names.CUSTOM_NAME}_{index}.pkl"
    loaded_into(obj, file, f"the state of registered object {index}", {}).give()
