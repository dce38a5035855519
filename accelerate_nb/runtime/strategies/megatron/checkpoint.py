"""The complete state of models of megatron-core and their optimizers, in the format of Megatron's distributed checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from torch import Tensor

from accelerate_nb.errors import CheckpointError, NotYetError
from accelerate_nb.runtime.checkpoints import file_names
from accelerate_nb.runtime.checkpoints.load_file import LoadedFile, read
from accelerate_nb.runtime.checkpoints.shards import ShardIndex
from accelerate_nb.runtime.checkpoints.writer import FileToWrite
from accelerate_nb.runtime.strategies.megatron import model_parallel, weight_states
from accelerate_nb.runtime.strategies.megatron.complete_state import parts_of, sharded_state
from accelerate_nb.runtime.strategies.megatron.model import MegatronModel
from accelerate_nb.runtime.strategies.megatron.optimizer import MegatronStep
from accelerate_nb.runtime.strategies.megatron.sharded_files import COMMON, folder_files, list_folder, read_tree
from accelerate_nb.runtime.world.world import World
from accelerate_nb.user_warnings import warn_user

# As Megatron names what an optimizer remembers: `optimizer.state.exp_avg.decoder.layers.0.mlp.linear_fc1.weight`.
_PREFIX = "optimizer.state."


def files(world: World, models: Sequence[MegatronModel], steps: Sequence[MegatronStep]) -> list[FileToWrite]:
    """The files of this process; all processes call it."""
    found: list[FileToWrite] = []
    for index, model in enumerate(models):
        found += folder_files(world, f"{file_names.MEGATRON_MODEL_NAME}_{index}", _model_tree(model), {}, {})
    for index, step in enumerate(steps):
        found += _optimizer_files(world, f"{file_names.OPTIMIZER_NAME}_{index}", step)
    content = {"degrees": model_parallel.degrees(), "states": model_parallel.random_states()}
    found.append(FileToWrite(file_names.of_rank(file_names.MEGATRON_RNG_STATE_NAME, world.rank), content))
    return found


def load(
    world: World, folder: Path, models: Sequence[MegatronModel], steps: Sequence[MegatronStep]
) -> list[LoadedFile]:
    """This process's parts of what was saved, in whichever degrees; models come before optimizers."""
    found = [_loaded_model(folder, index, model) for index, model in enumerate(models)]
    found += [_loaded_optimizer(folder, index, step) for index, step in enumerate(steps)]
    return found + _loaded_random_states(world, folder)


def _model_tree(model: MegatronModel) -> dict[Any, Any]:
    if getattr(model.config, "fp8", None):
        raise NotYetError(
            "A checkpoint was requested of a model that computes in 8 bits, whose scales are not kept here yet. Train in bf16, or "
            "save the weights with accelerator.save_model(model, folder)."
        )
    return {index: sharded_state(part) for index, part in enumerate(parts_of(model.module))}


def _loaded_model(folder: Path, index: int, model: MegatronModel) -> LoadedFile:
    path, expected = folder / f"{file_names.MEGATRON_MODEL_NAME}_{index}", f"the weights of model {index}"

    def receive(loaded: Any) -> None:
        for number, part in enumerate(parts_of(model.module)):
            part.load_state_dict(loaded[number], strict=False)

    return LoadedFile(path, expected, read_tree(list_folder(path, expected), _model_tree(model)), receive)


# Optimizers


def _learning(step: MegatronStep) -> tuple[list[Tensor], list[Any]]:
    """The weights of an optimizer, with their places in the whole model as Megatron describes them."""
    described = {
        id(value.data): value for value in nested_values(_model_tree(step.model)) if hasattr(value, "replica_id")
    }
    weights: list[Tensor] = [
        weight for weight in step.model.parameters() if id(weight) in described and weight.requires_grad
    ]
    return weights, [described[id(weight)] for weight in weights]


def _optimizer_files(world: World, name: str, step: MegatronStep) -> list[FileToWrite]:
    weights, places = _learning(step)
    states = weight_states.states_of(step.inner, weights, [is_main_replica(place.replica_id) for place in places])
    tree: dict[Any, Any] = {}
    numbers: dict[str, Tensor] = {}
    for index, (place, values) in enumerate(zip(places, states, strict=True)):
        for key, value in values.items():
            if value.dim() == 0:
                numbers[f"{_PREFIX}{key}.{place.key}"] = value
            else:
                tree.setdefault(index, {})[key] = _beside(place, key, value)
    scaler = step.loss_scaler
    common = {
        "param_groups": weight_states.options_of(step.inner),
        "grad_scaler": None if scaler is None else scaler.state_dict(),
    }
    return folder_files(world, name, tree, numbers, common)


def _beside(place: Any, key: str, value: Tensor) -> Any:
    """The place of a tensor that an optimizer remembers of a weight."""
    name = f"{_PREFIX}{key}.{place.key}"
    if isinstance(place, ShardedTensorFactory):
        return replace(place, key=name, data=value)
    return replace(place, key=name, data=value, dtype=value.dtype)


def _loaded_optimizer(folder: Path, index: int, step: MegatronStep) -> LoadedFile:
    path, expected = folder / f"{file_names.OPTIMIZER_NAME}_{index}", f"the state of optimizer {index}"
    shards = list_folder(path, expected)
    weights, places = _learning(step)
    tensors = read_tree(shards, _optimizer_tree(shards, weights, places))
    numbers = _read_numbers(shards, places)
    states = [{**tensors.get(number, {}), **numbers[number]} for number in range(len(weights))]
    common = read(path / COMMON, f"the settings of optimizer {index}")
    count = len(weight_states.options_of(step.inner))
    if len(common["param_groups"]) != count:
        raise CheckpointError(
            f"{path / COMMON} holds the settings of {len(common['param_groups'])} groups of weights, and optimizer {index} has {count}. "
            "Make the same optimizer as when the checkpoint was saved."
        )
    return LoadedFile(path, expected, {**common, "states": states}, partial(_receive, step, weights))


def _optimizer_tree(shards: ShardIndex, weights: Sequence[Tensor], places: Sequence[Any]) -> dict[Any, Any]:
    tree: dict[Any, Any] = {}
    for index, (weight, place) in enumerate(zip(weights, places, strict=True)):
        for key in _state_names(shards):
            beside = _beside(place, key, weight.detach().float())
            if all(value.key in shards.tensors and shards.tensors[value.key].dim() > 0 for value in _pieces(beside)):
                tree.setdefault(index, {})[key] = beside
    return tree


def _read_numbers(shards: ShardIndex, places: Sequence[Any]) -> list[dict[str, Tensor]]:
    names = [{key: f"{_PREFIX}{key}.{place.key}" for key in _state_names(shards)} for place in places]
    single = {
        name for found in names for name in found.values() if name in shards.tensors and shards.tensors[name].dim() == 0
    }
    values = shards.load(single)
    return [{key: values[name].clone() for key, name in found.items() if name in values} for found in names]


def _state_names(shards: ShardIndex) -> list[str]:
    """The names of what was remembered of weights, such as `exp_avg`."""
    return sorted({name.removeprefix(_PREFIX).partition(".")[0] for name in shards.tensors if name.startswith(_PREFIX)})


def _pieces(place: Any) -> list[ShardedTensor]:
    if isinstance(place, ShardedTensorFactory):
        return [value for value in nested_values(place.build()) if isinstance(value, ShardedTensor)]
    return [place]


def _receive(step: MegatronStep, weights: Sequence[Tensor], content: dict[str, Any]) -> None:
    inner, states = step.inner, content["states"]
    weight_states.set_states(inner, weights, states, content["param_groups"])
    if not any(weight_states.COPY in values for values in states):
        inner.reload_model_params()
    if step.loss_scaler is not None and content["grad_scaler"] is not None:
        step.loss_scaler.load_state_dict(content["grad_scaler"])


# Random numbers


def _loaded_random_states(world: World, folder: Path) -> list[LoadedFile]:
    path = folder / file_names.of_rank(file_names.MEGATRON_RNG_STATE_NAME, world.rank)
    if not path.exists():
        return []  # of fewer processes, of which a warning speaks already
    expected = "the random states of Megatron's layers"
    content = read(path, expected)
    if content["degrees"] != model_parallel.degrees():
        if world.is_main:
            warn_user(
                f"{folder} was saved in the degrees {content['degrees']}, and is loaded in {model_parallel.degrees()}. Random numbers of "
                "layers go on from where they are."
            )
        return []
    return [LoadedFile(path, expected, content["states"], model_parallel.set_random_states)]
