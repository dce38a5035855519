"""The complete weights of models of megatron-core, and their checkpoints with optimizers in the format of Megatron's distributed ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factory_merges, is_main_replica
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map, make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.checkpointable import CheckpointableShardedTensor, LocalShardsContainer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.nn import Module, ModuleList

from accelerate_nb.errors import CheckpointError, NotYetError
from accelerate_nb.runtime.checkpoints import file_names
from accelerate_nb.runtime.checkpoints.load_file import LoadedFile, read
from accelerate_nb.runtime.checkpoints.named_states import files_of_parts
from accelerate_nb.runtime.checkpoints.shards import LIST, ShardIndex, list_shards
from accelerate_nb.runtime.checkpoints.writer import FileToWrite, VerbatimFile
from accelerate_nb.runtime.strategies.megatron.engine import MegatronModel
from accelerate_nb.runtime.strategies.megatron.model_parallel import MegatronStep, degrees
from accelerate_nb.runtime.world.world import World
from accelerate_nb.user_warnings import warn_user

_NAMED_FIRST = 8


def parts_of(model: Module) -> list[Any]:
    """The consecutive parts of a model on this process: several where stages are interleaved."""
    return list(model) if isinstance(model, ModuleList) else [model]


def _sharded_state(model: Module) -> dict[int, Any]:
    """The weights of each part of a model on this process, with their places in the whole."""
    # layers have their numbers in their names, whichever stage they are on; Megatron adds its groups to the dictionary
    return {
        number: part.sharded_state_dict(metadata={"non_homogeneous_layers": True})
        for number, part in enumerate(parts_of(model))
    }


def _load_sharded_state(model: Module, tree: Mapping[int, Any]) -> None:
    for number, part in enumerate(parts_of(model)):
        part.load_state_dict(tree[number], strict=False)


def complete_state(model: Module, *, is_kept: bool) -> dict[str, Tensor]:
    """The complete weights on the CPU where they are kept, gathered one at a time, else nothing; all processes call it."""
    own: dict[str, list[ShardedTensor]] = {}
    for value in _main_replicas(_sharded_state(model)):
        own.setdefault(value.key, []).append(value)
    state: dict[str, Tensor] = {}
    for name in dict.fromkeys(_of_all(list(own))):
        pieces = _of_all(
            [(value.global_shape, value.global_slice(), value.data.detach().cpu()) for value in own.get(name, ())]
        )
        if is_kept:
            shape, _, first = pieces[0]
            state[name] = torch.empty(shape, dtype=first.dtype)
            for _, place, piece in pieces:
                state[name][place] = piece
    return state


def _of_all(items: list[Any]) -> list[Any]:
    """The items of all processes, in the order of these."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, items)
    return list(chain.from_iterable(gathered))


def load_complete(model: Module, state: Mapping[str, Tensor]) -> None:
    """Give each process its parts of complete weights; `CheckpointError` where some are missing, or of other shapes."""

    def fill(values: Sequence[ShardedTensor]) -> None:
        if missing := [value.key for value in values if value.key not in state]:
            names = ", ".join(missing[:_NAMED_FIRST])
            raise CheckpointError(
                f"Complete weights were given to a {type(parts_of(model)[0]).__name__}, but {len(missing)} of its weights are not among "
                f"them: {names}. "
                "Give it weights of a model of the same configuration, by Megatron's names."
            )
        for value in values:
            whole = state[value.key]
            if tuple(whole.shape) != tuple(value.global_shape):
                raise CheckpointError(
                    f"{value.key} has the shape {tuple(whole.shape)}, but {tuple(value.global_shape)} was expected. Give weights of a "
                    "model of the same configuration."
                )
            value.data = whole[value.global_slice()]

    _load_sharded_state(model, _fill_tree(_sharded_state(model), fill))


def _fill_tree(tree: Any, fill: Callable[[list[ShardedTensor]], None]) -> Any:
    """A tree with the tensors that `fill` gives its sharded ones; what is no tensor stays as it is."""
    prepared, _, factories = load_preprocess(tree)
    fill(_sharded(prepared))
    content = dict_list_map_outplace(
        lambda value: value.data if isinstance(value, (ShardedTensor, ShardedObject)) else value, prepared
    )
    return apply_factory_merges(content, factories)


COMMON = "common.pt"
# By this Megatron recognises its checkpoints.
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def _folder_files(world: World, name: str, tree: dict[Any, Any], common: dict[str, Any]) -> list[FileToWrite]:
    """This process's files of a folder, of a tree of `sharded_state_dict`'s leaves; all processes call it."""
    files = files_of_parts(world, name, _containers(_main_replicas(tree)))
    if world.is_main:
        files.append(FileToWrite(f"{name}/{COMMON}", common))
        files.append(VerbatimFile(f"{name}/metadata.json", json.dumps(_FORMAT).encode()))
    return files


def _list_folder(folder: Path, expected: str) -> ShardIndex:
    """The content of a folder, without its numbers; `CheckpointError` where it is none of Megatron's."""
    if not (folder / LIST).is_file():
        raise CheckpointError(
            f"{folder / LIST} does not exist, and {expected} was expected in its folder. Load a checkpoint that was saved in a "
            "training by Megatron, with the same objects prepared."
        )
    return list_shards(folder)


def _read_tree(shards: ShardIndex, tree: dict[Any, Any]) -> Any:
    """The tree with this process's parts of the values, on the CPU; what is no tensor stays as it is."""

    def fill(values: Sequence[ShardedTensor]) -> None:
        for value in values:
            value.data = torch.empty(value.local_shape, dtype=value.dtype)
        shards.load_into(_containers(values))

    return _fill_tree(tree, fill)


def _sharded(tree: Any) -> list[ShardedTensor]:
    return [value for value in nested_values(tree) if isinstance(value, ShardedTensor)]


def _main_replicas(tree: Any) -> list[ShardedTensor]:
    """The parts of a tree's values that this process writes, of those that several have."""
    return [value for value in _sharded(load_preprocess(tree)[0]) if is_main_replica(value.replica_id)]


def _containers(values: Iterable[ShardedTensor]) -> dict[str, Any]:
    """The parts by their keys, as torch.distributed.checkpoint takes them."""
    found: dict[str, list[Any]] = {}
    for value in values:
        # one of several experts has fewer axes than the whole
        shape = (1,) * value.prepend_axis_num + tuple(value.local_shape)
        whole = replace(value, data=value.data.view(shape), local_shape=shape, prepend_axis_num=0)
        found.setdefault(value.key, []).append(CheckpointableShardedTensor.from_sh_ten(whole))
    return {key: LocalShardsContainer(parts) for key, parts in found.items()}


# As Megatron names what an optimizer remembers: `optimizer.state.exp_avg.decoder.layers.0.mlp.linear_fc1.weight`.
_PREFIX = "optimizer.state."


def files(world: World, models: Sequence[MegatronModel], steps: Sequence[MegatronStep]) -> list[FileToWrite]:
    """The files of this process; all processes call it."""
    found: list[FileToWrite] = []
    for index, model in enumerate(models):
        found += _folder_files(world, f"{file_names.MEGATRON_MODEL_NAME}_{index}", _model_tree(model), {})
    for index, step in enumerate(steps):
        found += _optimizer_files(world, f"{file_names.OPTIMIZER_NAME}_{index}", step)
    states = dict(tensor_parallel.get_cuda_rng_tracker().get_states())
    content = {"degrees": degrees(), "states": states}
    found.append(FileToWrite(file_names.of_rank(file_names.MEGATRON_RNG_STATE_NAME, world.rank), content))
    return found


def load(
    world: World, folder: Path, models: Sequence[MegatronModel], steps: Sequence[MegatronStep]
) -> list[LoadedFile]:
    """This process's parts of what was saved, in whichever degrees; models come before optimizers."""
    found = []
    for index, model in enumerate(models):
        path, expected = folder / f"{file_names.MEGATRON_MODEL_NAME}_{index}", f"the weights of model {index}"
        tree = _read_tree(_list_folder(path, expected), _model_tree(model))
        found.append(LoadedFile(path, expected, tree, partial(_load_sharded_state, model.module)))
    found += [_loaded_optimizer(folder, index, step) for index, step in enumerate(steps)]
    path = folder / file_names.of_rank(file_names.MEGATRON_RNG_STATE_NAME, world.rank)
    if not path.exists():
        return found  # of fewer processes, of which a warning speaks already
    expected = "the random states of Megatron's layers"
    content = read(path, expected)
    if content["degrees"] == degrees():
        tracker = tensor_parallel.get_cuda_rng_tracker()
        found.append(LoadedFile(path, expected, content["states"], tracker.set_states))
    elif world.is_main:
        warn_user(
            f"{folder} was saved in the degrees {content['degrees']}, and is loaded in {degrees()}. Random numbers of "
            "layers go on from where they are."
        )
    return found


def _model_tree(model: MegatronModel) -> dict[Any, Any]:
    if getattr(model.config, "fp8", None):
        raise NotYetError(
            "A checkpoint was requested of a model that computes in 8 bits, whose scales are not kept here yet. Train in bf16, or "
            "save the weights with accelerator.save_model(model, folder)."
        )
    return _sharded_state(model.module)


# Optimizers

# The 32-bit copy of a weight of 16 bits, as Megatron calls it.
_COPY = "fp32_param"


def _learning(step: MegatronStep) -> list[tuple[Tensor, Any]]:
    """The weights of an optimizer, with their places in the whole model as Megatron describes them."""
    weights = [weight for weight in step.model.parameters() if weight.requires_grad]
    places = get_param_id_to_sharded_param_map(_model_tree(step.model), weights)
    return [(weights[index], places[index]) for index in sorted(places)]


def _kept(inner: Any) -> dict[int, tuple[Tensor, slice]]:
    """By each weight's identity the tensor that this process's optimizer updates, and the part of the flat weight that it is."""
    if isinstance(inner, DistributedOptimizer):
        found = {}
        for weight, (group, number) in inner.model_param_group_index_map.items():
            part = inner._get_model_param_range_map(weight)["param"]
            found[id(weight)] = (inner.optimizer.param_groups[group]["params"][number], slice(part.start, part.end))
        return found
    own = {id(main): (main, slice(None)) for group in inner.optimizer.param_groups for main in group["params"]}
    weights = chain.from_iterable(getattr(inner, "float16_groups", ()))
    copies = chain.from_iterable(getattr(inner, "fp32_from_float16_groups", ()))
    return {**own, **{id(weight): (copy, slice(None)) for weight, copy in zip(weights, copies, strict=True)}}


def _optimizer_state(inner: Any, weight: Tensor, main: Tensor) -> tuple[dict[str, Tensor], dict[str, float]]:
    """What an optimizer remembers of what it updates of a weight: tensors of that shape, and single numbers."""
    tensors, numbers = {}, {}
    copy = {} if weight.dtype == torch.float32 else {_COPY: main}
    for name, value in {**inner.optimizer.state.get(main, {}), **copy}.items():
        if isinstance(value, Tensor) and value.dim() == 0:
            numbers[name] = value.item()
        elif isinstance(value, Tensor) and value.shape == main.shape:
            tensors[name] = value
        elif value is not None:
            raise NotYetError(
                f"save_state was called with {type(inner.optimizer).__name__}, which remembers {name!r} of a weight: neither a tensor of "
                "the weight's shape nor a single number, which are what checkpoints of Megatron keep here so far. Train with AdamW, SGD "
                "or the like, or save the weights with accelerator.save_model(model, folder)."
            )
    return tensors, numbers


def _optimizer_files(world: World, name: str, step: MegatronStep) -> list[FileToWrite]:
    inner, kept = step.inner, _kept(step.inner)
    learning = _learning(step)
    own = [
        _optimizer_state(inner, weight, kept[id(weight)][0]) if id(weight) in kept else ({}, {})
        for weight, _ in learning
    ]
    facts = _of_all(
        [(place.key, set(tensors), numbers) for (_, place), (tensors, numbers) in zip(learning, own, strict=True)]
    )
    # by a weight's name in the whole model; of copies that have parts of the states each knows some weights
    numbers_of: dict[str, dict[str, float]] = {}
    for weight_name, _, numbers in facts:
        numbers_of.setdefault(weight_name, {}).update(numbers)
    common = {
        "param_groups": [
            {name: value for name, value in group.items() if name != "params"} for group in inner.optimizer.param_groups
        ],
        "numbers": numbers_of,
        "grad_scaler": None if step.loss_scaler is None else step.loss_scaler.state_dict(),
    }
    names = set[str]().union(*(found for _, found, _ in facts))
    tree: dict[Any, Any] = {}
    for (weight, place), (tensors, _) in zip(learning, own, strict=True):
        whole = tensors
        if isinstance(inner, DistributedOptimizer):
            # copies have parts, whose sum is the whole where each has zeros elsewhere
            whole = {}
            for key in sorted(names if weight.dtype != torch.float32 else names - {_COPY}):
                flat = torch.zeros(weight.numel(), device=weight.device)
                if key in tensors:
                    flat[kept[id(weight)][1]] = tensors[key].flatten()
                dist.all_reduce(flat, group=inner.data_parallel_group)
                is_written = is_main_replica(place.replica_id)
                whole[key] = flat.view(weight.shape).cpu() if is_written else torch.zeros(()).expand(weight.shape)
        tree[len(tree)] = {
            key: make_sharded_optimizer_tensor(place, value.detach(), f"{_PREFIX}{key}") for key, value in whole.items()
        }
    return _folder_files(world, name, tree, common)


def _loaded_optimizer(folder: Path, index: int, step: MegatronStep) -> LoadedFile:
    path, expected = folder / f"{file_names.OPTIMIZER_NAME}_{index}", f"the state of optimizer {index}"
    shards = _list_folder(path, expected)
    common = read(path / COMMON, f"the settings of optimizer {index}")
    if len(common["param_groups"]) != (count := len(step.inner.optimizer.param_groups)):
        raise CheckpointError(
            f"{path / COMMON} holds the settings of {len(common['param_groups'])} groups of weights, and optimizer {index} has {count}. "
            "Make the same optimizer as when the checkpoint was saved."
        )
    numbers_of: dict[str, dict[str, Any]] = common.get("numbers", {})
    found = {name: item for name, item in shards.tensors.items() if name.startswith(_PREFIX)}
    if "numbers" not in common:
        # a folder of an earlier version, where each number is a tensor among the shards
        for name, value in shards.load([name for name, item in found.items() if item.dim() == 0]).items():
            key, _, weight_name = name.removeprefix(_PREFIX).partition(".")
            numbers_of.setdefault(weight_name, {})[key] = value.item()
    # such as `exp_avg`
    kept = {name for name, item in found.items() if item.dim() > 0}
    keys = sorted({name.removeprefix(_PREFIX).partition(".")[0] for name in kept})
    learning = _learning(step)
    tree: dict[int, dict[str, Any]] = {}
    for weight, place in learning:
        values = {key: make_sharded_optimizer_tensor(place, weight.detach().float(), f"{_PREFIX}{key}") for key in keys}
        # weights of 32 bits have no copy
        tree[len(tree)] = {
            key: value
            for key, value in values.items()
            if all(piece.key in kept for piece in _sharded(load_preprocess({key: value})[0]))
        }
    tensors = _read_tree(shards, tree)
    states = [
        {
            **tensors.get(number, {}),
            **{
                # whatever torch's default is: AdamW counts its steps in 32 bits
                key: torch.tensor(value, dtype=torch.float32 if isinstance(value, float) else None)
                for key, value in numbers_of.get(place.key, {}).items()
            },
        }
        for number, (_, place) in enumerate(learning)
    ]
    weights = [weight for weight, _ in learning]
    return LoadedFile(path, expected, {**common, "states": states}, partial(_receive, step, weights))


def _receive(step: MegatronStep, weights: Sequence[Tensor], content: dict[str, Any]) -> None:
    inner, states = step.inner, content["states"]
    optimizer, kept = inner.optimizer, _kept(inner)
    # as torch counts the tensors that it updates
    counted = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    indices = {id(main): index for index, main in enumerate(counted)}
    state: dict[int, dict[str, Tensor]] = {}
    for weight, values in zip(weights, states, strict=True):
        if id(weight) not in kept:
            continue
        main, part = kept[id(weight)]
        own = {
            name: value if value.dim() == 0 else value.flatten()[part].clone().view(main.shape)
            for name, value in values.items()
        }
        if (copy := own.pop(_COPY, None)) is not None:
            main.data.copy_(copy)
        if own:
            state[indices[id(main)]] = own
    groups = [
        {**saved, "params": [indices[id(main)] for main in group["params"]]}
        for saved, group in zip(content["param_groups"], optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    if not any(_COPY in values for values in states):
        inner.reload_model_params()
    if step.loss_scaler is not None and content["grad_scaler"] is not None:
        step.loss_scaler.load_state_dict(content["grad_scaler"])
