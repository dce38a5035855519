"""The complete weights of a model whose parts are on several processes, by Megatron's names, and such weights as parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factory_merges, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from torch import Tensor
from torch.nn import Module, ModuleList

from accelerate_nb.errors import CheckpointError

_NAMED_FIRST = 8


def parts_of(model: Module) -> list[Any]:
    """The consecutive parts of a model on this process: several where stages are interleaved."""
    return list(model) if isinstance(model, ModuleList) else [model]


def sharded_state(part: Any) -> Any:
    """The weights of a part of a model on this process, with their places in the whole."""
    # layers have their numbers in their names, whichever stage they are on; Megatron adds its groups to the dictionary
    return part.sharded_state_dict(metadata={"non_homogeneous_layers": True})


def complete_state(model: Module, *, is_kept: bool) -> dict[str, Tensor]:
    """
    The complete weights, on the CPU of the processes that keep them, and an empty dictionary on the others.

    All processes call it; one weight at a time is gathered from those that have parts of it.
    """
    own: dict[str, list[ShardedTensor]] = {}
    for part in parts_of(model):
        prepared, _, _ = load_preprocess(sharded_state(part))
        for value in nested_values(prepared):
            if isinstance(value, ShardedTensor) and is_main_replica(value.replica_id):
                own.setdefault(value.key, []).append(value)
    state: dict[str, Tensor] = {}
    for name in _names(own):
        pieces = [(value.global_shape, value.global_slice(), value.data.detach().cpu()) for value in own.get(name, ())]
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, pieces)
        if is_kept:
            state[name] = _joined([piece for found in gathered for piece in found])
    return state


def _names(own: Mapping[str, Any]) -> list[str]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, list(own))
    return list(dict.fromkeys(name for names in gathered for name in names))


def _joined(pieces: list[tuple[Any, Any, Tensor]]) -> Tensor:
    shape, _, first = pieces[0]
    whole = torch.empty(shape, dtype=first.dtype)
    for _, place, piece in pieces:
        whole[place] = piece
    return whole


def load_complete(model: Module, state: Mapping[str, Tensor]) -> None:
    """Give each process its parts of complete weights; `CheckpointError` where some are missing, or of other shapes."""
    for part in parts_of(model):
        prepared, _, factories = load_preprocess(sharded_state(part))
        missing = [
            value.key
            for value in nested_values(prepared)
            if isinstance(value, ShardedTensor) and value.key not in state
        ]
        if missing:
            names = ", ".join(missing[:_NAMED_FIRST])
            raise CheckpointError(
                f"Complete weights were given to a {type(part).__name__}, but {len(missing)} of its weights are not among them: {names}. "
                "Give it weights of a model of the same configuration, by Megatron's names."
            )
        loaded = dict_list_map_outplace(lambda value: _own_piece(value, state), prepared)
        part.load_state_dict(apply_factory_merges(loaded, factories), strict=False)


def _own_piece(value: Any, state: Mapping[str, Tensor]) -> Any:
    if isinstance(value, ShardedObject):
        return value.data
    if not isinstance(value, ShardedTensor):
        return value
    whole = state[value.key]
    if tuple(whole.shape) != tuple(value.global_shape):
        raise CheckpointError(
            f"{value.key} has the shape {tuple(whole.shape)}, but {tuple(value.global_shape)} was expected. Give weights of a model of "
            "the same configuration."
        )
    return whole[value.global_slice()]
