"""Accelerate's functions that save and load the state of a sharded model and its optimizer, which other libraries call."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from accelerate_nb.runtime.checkpoints.load_file import LoadedFile, read
from accelerate_nb.runtime.checkpoints.writer import FileToWrite, LastFile, write_files
from accelerate_nb.runtime.strategies.fsdp.plugin import FullyShardedDataParallelPlugin
from accelerate_nb.runtime.training.unwrap import is_peft_model

_Path = str | os.PathLike[str]


def save_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Any,
    model: torch.nn.Module,
    output_dir: _Path,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """
    Write a sharded model to a folder, in parts or complete as the plugin's `state_dict_type` says; all processes call it.

    With `adapter_only` of a model of PEFT the weights that learn alone. Parts without `use_dcp` are a file of each process's
    own part, which the same number of processes can load, with `use_dcp=False` too.
    """
    from accelerate_nb.runtime.checkpoints import named_states

    sharded = accelerator.unwrap_model(model, keep_torch_compile=False)
    state = named_states.model_state(sharded, learning_only=adapter_only and is_peft_model(sharded))
    in_parts = fsdp_plugin.writes_parts
    if in_parts and not use_dcp:
        files = [FileToWrite(_process_file(accelerator, named_states.model_folder(model_index)), state)]
    else:
        files = named_states.model_files(accelerator.world, state, model_index, in_parts)
    _write(accelerator, output_dir, files)


def load_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Any,
    model: torch.nn.Module,
    input_dir: _Path,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """
    Read what `save_fsdp_model` wrote, here or in Accelerate; all processes call it, as many as with `use_dcp=False` saved.

    Returns the missing and the unexpected names, as `load_state_dict` does.
    """
    from accelerate_nb.runtime.checkpoints import named_states

    sharded = accelerator.unwrap_model(model, keep_torch_compile=False)
    parts, learning_only = named_states.model_folder(model_index), adapter_only and is_peft_model(sharded)
    if fsdp_plugin.writes_parts and not use_dcp:
        loaded = _own_part(
            Path(input_dir, _process_file(accelerator, parts)),
            f"this process's part of model {model_index}",
            sharded,
            lambda state: sharded.load_state_dict(state, strict=not learning_only),
        )
    else:
        folder, in_parts = _above(input_dir, parts), fsdp_plugin.writes_parts
        loaded = named_states.load_model(folder, model_index, sharded, learning_only=learning_only, in_parts=in_parts)
    result = loaded.give()
    accelerator.wait_for_everyone()
    return result


def save_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Any,
    optimizer: Any,
    model: torch.nn.Module,
    output_dir: _Path,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Write the state of an optimizer of a sharded model to a folder, as `save_fsdp_model` does with the model."""
    from accelerate_nb.runtime.checkpoints import named_states

    models = [accelerator.unwrap_model(model, keep_torch_compile=False)]
    in_parts = fsdp_plugin.writes_parts
    if in_parts and not use_dcp:
        name = _process_file(accelerator, named_states.optimizer_folder(optimizer_index))
        files = [FileToWrite(name, named_states.optimizer_state(optimizer, models))]
    else:
        files = named_states.optimizer_files(accelerator.world, optimizer, models, optimizer_index, in_parts)
    _write(accelerator, output_dir, files)


def load_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Any,
    optimizer: Any,
    model: torch.nn.Module,
    input_dir: _Path,
    optimizer_index: int = 0,
    adapter_only: bool = False,  # noqa: ARG001 - an optimizer has what learns alone
    use_dcp: bool = True,
) -> None:
    """Read what `save_fsdp_optimizer` wrote, as `load_fsdp_model` does with the model."""
    from accelerate_nb.runtime.checkpoints import named_states

    models = [accelerator.unwrap_model(model, keep_torch_compile=False)]
    parts = named_states.optimizer_folder(optimizer_index)
    if fsdp_plugin.writes_parts and not use_dcp:
        loaded = _own_part(
            Path(input_dir, _process_file(accelerator, parts)),
            f"this process's part of the state of optimizer {optimizer_index}",
            models[0],
            lambda state: named_states.set_optimizer_state(optimizer, models, state),
        )
    else:
        folder, in_parts = _above(input_dir, parts), fsdp_plugin.writes_parts
        loaded = named_states.load_optimizer(folder, optimizer_index, optimizer, models, in_parts=in_parts)
    loaded.give()
    accelerator.wait_for_everyone()


def _process_file(accelerator: Any, stem: str) -> str:
    """Accelerate's name for the file of this process's part."""
    return f"{stem}_rank{accelerator.process_index}.bin"


def _own_part(path: Path, expected: str, model: torch.nn.Module, receive: Callable[[Any], Any]) -> LoadedFile:
    """What a process wrote of its own part, on the mesh of the model that it is for, which may have been named otherwise."""
    # torch knows tensors of a mesh as data once their module is there
    from torch.distributed.tensor import DTensor

    values = model.state_dict().values()
    meshes = {value.device_mesh.ndim: value.device_mesh for value in values if isinstance(value, DTensor)}

    def on_mesh(value: Any) -> Any:
        mesh = meshes.get(value.device_mesh.ndim) if isinstance(value, DTensor) else None
        if mesh is None:
            return value
        local = value.to_local().to(mesh.device_type)
        return DTensor.from_local(
            local, mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )

    return LoadedFile(path, expected, tree_map(on_mesh, read(path, expected)), receive)


def _above(path: _Path, folder: str) -> Path:
    """The checkpoint's folder, where the folder of parts itself was passed."""
    found = Path(path)
    return found.parent if found.name == folder else found


def _write(accelerator: Any, folder: _Path, files: Sequence[FileToWrite]) -> None:
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    accelerator.wait_for_everyone()
    write_files([file for file in files if not isinstance(file, LastFile)], path)
    accelerator.wait_for_everyone()
    for file in files:
        if isinstance(file, LastFile):
            file.write_last(path)
    accelerator.wait_for_everyone()
