"""GPT-2 of transformers in Megatron."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate_nb.runtime.strategies.megatron.conversion.family import Architecture, activation, refuse
from accelerate_nb.runtime.strategies.megatron.conversion.layouts import (
    SAME,
    ConvertedWeight,
    QueriesKeysValues,
    Transposed,
    weights_of_words,
)


def gpt2(config: Any) -> Architecture:
    """The architecture of a `GPT2Config`; `ConfigurationError` names what Megatron does not compute."""
    refused = {
        "add_cross_attention": config.add_cross_attention,
        "scale_attn_weights": not config.scale_attn_weights,
        "scale_attn_by_inverse_layer_idx": config.scale_attn_by_inverse_layer_idx,
    }
    refuse("GPT-2", config, refused)
    settings = {
        "num_layers": config.n_layer,
        "hidden_size": config.n_embd,
        "num_attention_heads": config.n_head,
        "ffn_hidden_size": config.n_inner or 4 * config.n_embd,
        "activation_func": activation(config.activation_function),
        "layernorm_epsilon": config.layer_norm_epsilon,
        "hidden_dropout": config.resid_pdrop,
        "attention_dropout": config.attn_pdrop,
        "init_method_std": config.initializer_range,
    }
    arguments = {
        "max_sequence_length": config.n_positions,
        "position_embedding_type": "learned_absolute",
        "share_embeddings_and_output_weights": config.tie_word_embeddings,
    }
    return Architecture(settings, arguments, lambda words: list(_weights(config, words)), config.embd_pdrop)


def _weights(config: Any, words: int) -> Iterator[ConvertedWeight]:
    yield from weights_of_words(config, "transformer.wte.weight", words)
    yield ConvertedWeight("embedding.position_embeddings.weight", ("transformer.wpe.weight",))
    for part in ("weight", "bias"):
        yield ConvertedWeight(f"decoder.final_layernorm.{part}", (f"transformer.ln_f.{part}",))
    for layer in range(config.n_layer):
        yield from _layer_weights(config, f"decoder.layers.{layer}", f"transformer.h.{layer}")


def _layer_weights(config: Any, name: str, source: str) -> Iterator[ConvertedWeight]:
    for part in ("weight", "bias"):
        is_weight = part == "weight"
        plain = Transposed() if is_weight else SAME
        attention, perceptron = f"{name}.self_attention", f"{name}.mlp"
        yield ConvertedWeight(f"{attention}.linear_qkv.layer_norm_{part}", (f"{source}.ln_1.{part}",))
        yield ConvertedWeight(
            f"{attention}.linear_qkv.{part}",
            (f"{source}.attn.c_attn.{part}",),
            QueriesKeysValues(
                config.n_head, config.n_head, config.n_embd // config.n_head, is_one=True, is_transposed=is_weight
            ),
        )
        yield ConvertedWeight(f"{attention}.linear_proj.{part}", (f"{source}.attn.c_proj.{part}",), plain)
        yield ConvertedWeight(f"{perceptron}.linear_fc1.layer_norm_{part}", (f"{source}.ln_2.{part}",))
        yield ConvertedWeight(f"{perceptron}.linear_fc1.{part}", (f"{source}.mlp.c_fc.{part}",), plain)
        yield ConvertedWeight(f"{perceptron}.linear_fc2.{part}", (f"{source}.mlp.c_proj.{part}",), plain)
