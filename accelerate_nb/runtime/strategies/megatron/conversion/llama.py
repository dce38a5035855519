"""Llama of transformers in Megatron."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.strategies.megatron.conversion.family import Architecture, activation, refuse
from accelerate_nb.runtime.strategies.megatron.conversion.layouts import (
    ConvertedWeight,
    GateAndUp,
    QueriesKeysValues,
    weights_of_words,
)

# What Megatron computes with of Llama 3's scaling, whose factor alone is an argument of `GPTModel`.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def llama(config: Any) -> Architecture:
    """The architecture of a `LlamaConfig`; `ConfigurationError` names what Megatron does not compute."""
    refuse("Llama", config, {"attention_bias": config.attention_bias != config.mlp_bias})
    settings = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": _channels(config),
        "ffn_hidden_size": config.intermediate_size,
        "gated_linear_unit": True,
        "activation_func": activation(config.hidden_act),
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "add_bias_linear": config.attention_bias,
        "hidden_dropout": 0.0,
        "attention_dropout": config.attention_dropout,
        "init_method_std": config.initializer_range,
    }
    arguments = {
        "max_sequence_length": config.max_position_embeddings,
        "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": config.tie_word_embeddings,
        **_rotation(config),
    }
    return Architecture(settings, arguments, lambda words: list(_weights(config, words)))


def _channels(config: Any) -> int:
    channels: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return channels


def _rotation(config: Any) -> dict[str, Any]:
    """The arguments of rotary embeddings; transformers keeps them in `rope_parameters` from version 5 on."""
    found = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    base = found.get("rope_theta") or config.rope_theta
    kind = found.get("rope_type", "default")
    if kind == "default":
        return {"rotary_base": base}
    if kind == "linear":
        return {"rotary_base": base, "seq_len_interpolation_factor": found["factor"]}
    if kind == "llama3" and all(found.get(name) == value for name, value in _LLAMA3.items()):
        return {"rotary_base": base, "rope_scaling": True, "rope_scaling_factor": found["factor"]}
    raise ConfigurationError(
        f"A Llama with the rotary embeddings {found} was to become a model of Megatron, which computes 'default', 'linear', and 'llama3' "
        f"with {_LLAMA3}. Take a model with one of these."
    )


def _weights(config: Any, words: int) -> Iterator[ConvertedWeight]:
    yield from weights_of_words(config, "model.embed_tokens.weight", words)
    yield ConvertedWeight("decoder.final_layernorm.weight", ("model.norm.weight",))
    for layer in range(config.num_hidden_layers):
        yield from _layer_weights(config, f"decoder.layers.{layer}", f"model.layers.{layer}")


def _layer_weights(config: Any, name: str, source: str) -> Iterator[ConvertedWeight]:
    attention, perceptron = f"{name}.self_attention", f"{name}.mlp"
    yield ConvertedWeight(f"{attention}.linear_qkv.layer_norm_weight", (f"{source}.input_layernorm.weight",))
    yield ConvertedWeight(f"{perceptron}.linear_fc1.layer_norm_weight", (f"{source}.post_attention_layernorm.weight",))
    heads = QueriesKeysValues(config.num_attention_heads, config.num_key_value_heads, _channels(config))
    for part in ("weight", "bias") if config.attention_bias else ("weight",):
        sources = tuple(f"{source}.self_attn.{kind}_proj.{part}" for kind in "qkv")
        yield ConvertedWeight(f"{attention}.linear_qkv.{part}", sources, heads)
        yield ConvertedWeight(f"{attention}.linear_proj.{part}", (f"{source}.self_attn.o_proj.{part}",))
        sources = (f"{source}.mlp.gate_proj.{part}", f"{source}.mlp.up_proj.{part}")
        yield ConvertedWeight(f"{perceptron}.linear_fc1.{part}", sources, GateAndUp())
        yield ConvertedWeight(f"{perceptron}.linear_fc2.{part}", (f"{source}.mlp.down_proj.{part}",))
