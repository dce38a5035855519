"""What a model of megatron-core has to be to train on a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.strategies.megatron.plugin import MegatronLMPlugin
from accelerate_nb.runtime.world.mesh import Mesh


def check(parts: Sequence[Any], mesh: Mesh, plugin: MegatronLMPlugin, dtype: torch.dtype) -> None:
    """Raise a `ConfigurationError` for parts of a model that can't train; stages send numbers of `dtype` where a model says no other."""
    for part in parts:
        _check_degrees(part, mesh, plugin)
        if mesh.pp > 1 and part.config.pipeline_dtype is None:
            part.config.pipeline_dtype = dtype
    if len(parts) > 1:
        _check_interleaving(parts, mesh.pp)


def _check_degrees(model: Any, mesh: Mesh, plugin: MegatronLMPlugin) -> None:
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "tensor_model_parallel_size"):
        raise ConfigurationError(
            f"A {type(model).__name__} was prepared for Megatron, but it is no model of megatron-core. Build one, such as GPTModel, "
            "with a TransformerConfig, after the Accelerator was made, or give a model of transformers to accelerator.prepare(...)."
        )
    degrees = {
        "tensor_model_parallel_size": mesh.tp,
        "pipeline_model_parallel_size": mesh.pp,
        "context_parallel_size": mesh.cp,
        "expert_model_parallel_size": plugin.expert_model_parallel_size,
        "sequence_parallel": config.sequence_parallel or plugin.sequence_parallelism,
    }
    if config.num_moe_experts is not None:
        degrees["expert_tensor_parallel_size"] = plugin.expert_tensor_parallel_size
    for name, wanted in degrees.items():
        if (value := getattr(config, name)) != wanted:
            raise ConfigurationError(
                f"TransformerConfig({name}={value}) was found in a model that is prepared on {mesh}. Build it with {name}={wanted}."
            )


def _check_interleaving(parts: Sequence[Any], stages: int) -> None:
    """Messages of a stage to the next and to the former one go to the same process in a pipeline of two, which mixes them up."""
    config = parts[0].config
    if config.virtual_pipeline_model_parallel_size != len(parts):
        raise ConfigurationError(
            f"{len(parts)} parts of a model were prepared together, but its TransformerConfig has virtual_pipeline_model_parallel_size="
            f"{config.virtual_pipeline_model_parallel_size}. Build it with {len(parts)}."
        )
    if stages == 2 and not config.overlap_p2p_comm:
        raise ConfigurationError(
            "Interleaved stages were requested in a pipeline of 2 processes, where Megatron needs messages in pairs. Build the "
            "TransformerConfig with overlap_p2p_comm=True and batch_p2p_comm=False, or take pp_degree=4 or more."
        )
