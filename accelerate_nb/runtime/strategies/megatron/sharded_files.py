"""The files of Megatron's distributed checkpoints: what processes have parts of, by its names, and how they are read back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factory_merges, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.checkpointable import CheckpointableShardedTensor, LocalShardsContainer
from torch import Tensor

from accelerate_nb.errors import CheckpointError
from accelerate_nb.runtime.checkpoints.named_states import files_of_parts
from accelerate_nb.runtime.checkpoints.shards import LIST, ShardIndex, list_shards
from accelerate_nb.runtime.checkpoints.writer import FileToWrite, VerbatimFile
from accelerate_nb.runtime.world.world import World

COMMON = "common.pt"
# By this Megatron recognises its checkpoints.
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def folder_files(
    world: World, name: str, tree: dict[Any, Any], numbers: Mapping[str, Tensor], common: dict[str, Any]
) -> list[FileToWrite]:
    """
    The files of this process for a folder of this name; all processes call it.

    `tree` is nested, with what `sharded_state_dict` returns as its leaves; `numbers` and `common` are equal on all processes.
    """
    prepared, _, _ = load_preprocess(tree)
    own = [value for value in _sharded(prepared) if is_main_replica(value.replica_id)]
    files = files_of_parts(world, name, {**_containers(own), **numbers})
    if world.is_main:
        files.append(FileToWrite(f"{name}/{COMMON}", common))
        files.append(VerbatimFile(f"{name}/metadata.json", json.dumps(_FORMAT).encode()))
    return files


def list_folder(folder: Path, expected: str) -> ShardIndex:
    """The content of a folder, without its numbers; `CheckpointError` where it is none of Megatron's."""
    if not (folder / LIST).is_file():
        raise CheckpointError(
            f"{folder / LIST} does not exist, and {expected} was expected in its folder. Load a checkpoint that was saved in a "
            "training by Megatron, with the same objects prepared."
        )
    return list_shards(folder)


def read_tree(shards: ShardIndex, tree: dict[Any, Any]) -> Any:
    """The tree with this process's parts of the values, on the CPU; what is no tensor stays as it is."""
    prepared, _, factories = load_preprocess(tree)
    empty = dict_list_map_outplace(_without_numbers, prepared)
    shards.load_into(_containers(_sharded(empty)))
    loaded = dict_list_map_outplace(
        lambda value: value.data if isinstance(value, (ShardedTensor, ShardedObject)) else value, empty
    )
    return apply_factory_merges(loaded, factories)


def _without_numbers(value: Any) -> Any:
    if not isinstance(value, ShardedTensor):
        return value
    return replace(value, data=torch.empty(value.local_shape, dtype=value.dtype))


def _sharded(tree: Any) -> list[ShardedTensor]:
    return [value for value in nested_values(tree) if isinstance(value, ShardedTensor)]


def _containers(values: Iterable[ShardedTensor]) -> dict[str, Any]:
    """The parts by their keys, as torch.distributed.checkpoint takes them."""
    found: dict[str, list[Any]] = {}
    for value in values:
        found.setdefault(value.key, []).append(CheckpointableShardedTensor.from_sh_ten(_in_all_axes(value)))
    return {key: LocalShardsContainer(parts) for key, parts in found.items()}


def _in_all_axes(value: ShardedTensor) -> ShardedTensor:
    """A part in as many axes as the whole has: one of several experts has less."""
    if value.prepend_axis_num == 0:
        return value
    shape = (1,) * value.prepend_axis_num + tuple(value.local_shape)
    return replace(value, data=value.data.view(shape), local_shape=shape, prepend_axis_num=0)
