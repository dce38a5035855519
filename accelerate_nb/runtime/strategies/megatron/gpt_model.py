"""This process's part of a `GPTModel`, as an architecture and the groups of Megatron have it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.utils import is_vp_first_stage, is_vp_last_stage
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import Module, ModuleList

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.strategies.megatron import model_parallel
from accelerate_nb.runtime.strategies.megatron.conversion.family import Architecture


def build(architecture: Architecture, words: int, settings: Mapping[str, Any], layer_spec: Any) -> Module:
    """
    A part with weights that are random still; a `ModuleList` of parts where stages are interleaved.

    Megatron takes `hidden_dropout` for embeddings, too, which have a probability of their own unless `settings` have one.
    """
    config = TransformerConfig(**{**architecture.settings, **_degrees(), **settings})
    if layer_spec is None:
        _refuse_cut_sequences(config)
        layer_spec = get_gpt_layer_local_spec(normalization=config.normalization)
    count = config.virtual_pipeline_model_parallel_size
    parts = [
        _part(architecture, words, config, layer_spec, stage) for stage in ([None] if count is None else range(count))
    ]
    if parts[0].pre_process and "hidden_dropout" not in settings:
        parts[0].embedding.embedding_dropout.p = architecture.embedding_dropout
    return parts[0] if count is None else ModuleList(parts)


def _refuse_cut_sequences(config: TransformerConfig) -> None:
    cut = {"sequence_parallel": config.sequence_parallel, "context_parallel_size": config.context_parallel_size > 1}
    if names := [name for name, is_cut in cut.items() if is_cut]:
        raise ConfigurationError(
            f"{' and '.join(names)} was requested with megatron-core's own layers, which compute whole sequences. Pass layer_spec with those "
            "of Transformer Engine, get_gpt_layer_with_transformer_engine_spec(...), or leave it out."
        )


def _degrees() -> dict[str, int]:
    found = model_parallel.degrees()
    return {
        "tensor_model_parallel_size": found["tp"],
        "pipeline_model_parallel_size": found["pp"],
        "context_parallel_size": found["cp"],
        "expert_model_parallel_size": found["ep"],
    }


def _part(architecture: Architecture, words: int, config: Any, layer_spec: Any, stage: int | None) -> Any:
    count = config.virtual_pipeline_model_parallel_size
    return GPTModel(
        config=config,
        transformer_layer_spec=layer_spec,
        vocab_size=words,
        pre_process=parallel_state.is_pipeline_first_stage() and is_vp_first_stage(stage, count),
        post_process=parallel_state.is_pipeline_last_stage() and is_vp_last_stage(stage, count),
        vp_stage=stage,
        **architecture.arguments,
    )
