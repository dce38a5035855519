"""States by names of weights, in parts or complete: what FSDP writes, for any number of processes and any strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict as states
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from accelerate_nb.errors import CheckpointError, ConfigurationError
from accelerate_nb.runtime.checkpoints import file_names
from accelerate_nb.runtime.checkpoints.dcp.index import LIST, MODEL_FOLDER, list_shards
from accelerate_nb.runtime.checkpoints.dcp.writer import files_of_parts
from accelerate_nb.runtime.checkpoints.io.writer import FileToWrite
from accelerate_nb.runtime.checkpoints.load_file import LoadedFile, read
from accelerate_nb.runtime.operations.sharded_tensors import part_of, whole
from accelerate_nb.runtime.training.repoint import load_original_state, original_name, original_state
from accelerate_nb.runtime.world.world import World

_COMPLETE = states.StateDictOptions(full_state_dict=True, cpu_offload=True)


def parts_of(state: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """Complete weights as a sharded model has them; one that does not fit stays, for the model to name it."""
    return {
        name: part_of(value, like[name]) if name in like and like[name].shape == value.shape else value
        for name, value in state.items()
    }


def model_folder(index: int) -> str:
    """The folder of a model's parts."""
    return f"{MODEL_FOLDER}_{index}"


def optimizer_folder(index: int) -> str:
    """The folder of the parts of an optimizer's state."""
    return f"{file_names.OPTIMIZER_NAME}_{index}"


def model_state(model: Module, *, learning_only: bool = False) -> dict[str, Any]:
    """
    This process's weights and buffers of a model, those that are sharded as DTensors; or the weights alone that learn.

    What is on the meta device is another process's.
    """
    state = {name: value for name, value in original_state(model).items() if not _is_elsewhere(value)}
    if not learning_only:
        return state
    learning = {original_name(name) for name, weight in model.named_parameters() if weight.requires_grad}
    return {name: value for name, value in state.items() if name in learning}


def model_files(world: World, state: dict[str, Any], index: int, in_parts: bool) -> list[FileToWrite]:
    """The files of this process for a model's weights, under Accelerate's names and keys; all processes call it."""
    if in_parts:
        return files_of_parts(world, model_folder(index), {"model": state})
    complete = {name: _complete(value, world.is_main) for name, value in state.items()}
    return [FileToWrite(file_names.numbered(MODEL_FOLDER, index), complete)] if world.is_main else []


def optimizer_files(
    world: World, optimizer: Any, models: Sequence[Module], index: int, in_parts: bool
) -> list[FileToWrite]:
    """The files of this process for the state of an optimizer of one of these models; all processes call it."""
    state = optimizer_state(optimizer, models, None if in_parts else _COMPLETE)
    if in_parts:
        return files_of_parts(world, optimizer_folder(index), {"optimizer": state})
    return [FileToWrite(file_names.numbered(file_names.OPTIMIZER_NAME, index), state)] if world.is_main else []


def optimizer_state(optimizer: Any, models: Sequence[Module], options: states.StateDictOptions | None = None) -> Any:
    """This process's part of the state of an optimizer of one of these models, by names of weights."""
    bare = _bare(optimizer)
    return states.get_optimizer_state_dict(_model_of(bare, models), bare, options=options)


def set_optimizer_state(optimizer: Any, models: Sequence[Module], state: dict[str, Any]) -> None:
    """Give an optimizer of one of these models what `optimizer_state` returned."""
    states.set_optimizer_state_dict(_model_of(optimizer, models), _bare(optimizer), state)


def _complete(value: Any, is_kept: bool) -> Any:
    """A whole tensor in host memory, for the process that keeps it."""
    found = whole(value) if isinstance(value, Tensor) else value
    return found.cpu() if is_kept and isinstance(found, Tensor) else found if is_kept else None


def load(folder: Path, models: Sequence[Module], optimizers: Sequence[Any]) -> list[LoadedFile]:
    """This process's parts of all models' weights and all optimizers' states, or the whole of those that are not sharded."""
    found = [load_model(folder, index, model) for index, model in enumerate(models)]
    return found + [load_optimizer(folder, index, optimizer, models) for index, optimizer in enumerate(optimizers)]


def load_model(folder: Path, index: int, model: Module, *, learning_only: bool = False) -> LoadedFile:
    """This process's part of a model's weights, or the whole of those that are not sharded."""
    parts, complete = folder / model_folder(index), folder / file_names.numbered(MODEL_FOLDER, index)
    expected, state = f"the weights of model {index}", model_state(model, learning_only=learning_only)

    def receive(loaded: dict[str, Any]) -> None:
        elsewhere = {name: value for name, value in original_state(model).items() if _is_elsewhere(value)}
        load_original_state(model, {**loaded, **elsewhere}, strict=not learning_only)

    if complete.exists():
        found = {original_name(name): value for name, value in read(complete, expected, mmap=True).items()}
        return LoadedFile(complete, expected, parts_of(found, state), receive)
    if not (parts / LIST).is_file():
        raise CheckpointError(
            f"{parts / LIST} does not exist, and {expected} were expected in its folder. Prepare the same objects as when the "
            "checkpoint was saved, or choose another folder."
        )
    content = {"model": _like(state)}
    list_shards(parts).load_into(content)
    return LoadedFile(parts, expected, content["model"], receive)


def load_optimizer(folder: Path, index: int, optimizer: Any, models: Sequence[Module]) -> LoadedFile:
    """This process's part of an optimizer's state: in parts, or complete by names of weights or by their numbers."""
    model, bare = _model_of(optimizer, models), _bare(optimizer)
    parts, complete = folder / optimizer_folder(index), folder / file_names.numbered(file_names.OPTIMIZER_NAME, index)
    expected = f"the state of optimizer {index}"
    if (parts / LIST).exists():
        content = {"optimizer": _like(_empty_state(model, bare))}
        list_shards(parts).load_into(content)
        state, path = content["optimizer"], parts
    else:
        state, path = _in_parts(_by_names(read(complete, expected, mmap=True), model, bare), model), complete

    def receive(loaded: Any) -> None:
        states.set_optimizer_state_dict(model, bare, loaded)

    return LoadedFile(path, expected, state, receive)


def _is_elsewhere(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _like(state: Any) -> Any:
    """A state with new tensors in place of its own: what is read changes nothing until all of a checkpoint could be read."""
    return tree_map(lambda value: torch.empty_like(value) if isinstance(value, Tensor) else value, state)


def _empty_state(model: Module, optimizer: Any) -> Any:
    """A state of the right shapes; an optimizer that has not stepped has none again afterwards."""
    was_empty = not optimizer.state
    try:
        return states.get_optimizer_state_dict(model, optimizer)
    finally:
        if was_empty:
            optimizer.state.clear()


def _by_names(state: dict[str, Any], model: Module, optimizer: Any) -> dict[str, Any]:
    """The state with weights by their names, where it has them by their numbers, as optimizers themselves do."""
    groups = state["param_groups"]
    if not all(isinstance(key, int) for group in groups for key in group["params"]):
        return state
    names = {id(weight): original_name(name) for name, weight in model.named_parameters()}
    ordered = [names[id(weight)] for group in optimizer.param_groups for weight in group["params"]]
    numbers = [number for group in groups for number in group["params"]]
    by_number = dict(zip(numbers, ordered, strict=True))
    return {
        "state": {by_number[number]: kept for number, kept in state["state"].items()},
        "param_groups": [{**group, "params": [by_number[number] for number in group["params"]]} for group in groups],
    }


def _in_parts(state: dict[str, Any], model: Module) -> dict[str, Any]:
    weights = {original_name(name): weight for name, weight in model.named_parameters()}
    kept = {
        name: {
            key: part_of(value, weights[name])
            if isinstance(value, Tensor) and value.shape == weights[name].shape
            else value
            for key, value in values.items()
        }
        for name, values in state["state"].items()
    }
    return {**state, "state": kept}


def _bare(optimizer: Any) -> Any:
    """The optimizer inside of a prepared one."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def _model_of(optimizer: Any, models: Sequence[Module]) -> Module:
    """The model whose weights an optimizer updates."""
    learning = {id(weight) for group in _bare(optimizer).param_groups for weight in group["params"]}
    found = next((model for model in models if learning <= {id(weight) for weight in model.parameters()}), None)
    if found is None:
        raise ConfigurationError(
            "An optimizer updates weights that are in no prepared model, or in several, so its state can't be kept by their "
            "names. Prepare its model, and make one optimizer for each model."
        )
    return found
