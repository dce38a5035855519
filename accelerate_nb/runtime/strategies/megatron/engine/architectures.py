"""What of a transformers model's configuration is more than a size: its norms, activations and positions in Megatron-LM's arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.strategies.megatron.conversion.convert import known_architecture
from accelerate_nb.runtime.strategies.megatron.conversion.family import activation
from accelerate_nb.runtime.strategies.megatron.model_parsers import parse_config, parser_of

# The arguments of Megatron-LM that a `GPTModel` takes under another name.
_RENAMED = {"rope_scaling": "use_rope_scaling", "max_sequence_length": "max_position_embeddings"}


def architecture(config: Any) -> dict[str, Any]:
    """
    The arguments of the model that a configuration of transformers describes.

    Of a type that people have added a parser for, that parser says all. `ConfigurationError` for what megatron-core has not.
    """
    if (known := known_architecture(config)) is not None:
        arguments = {_RENAMED.get(name, name): value for name, value in known.arguments.items()}
        is_shared = arguments.pop("share_embeddings_and_output_weights")
        end = _single(getattr(config, "eos_token_id", None))
        return {
            **known.settings,
            **arguments,
            "untie_embeddings_and_output_weights": not is_shared,
            "eos_token_id": end,
        }
    if (read := _READ.get(config.model_type)) is not None:
        return read(config)
    if parser_of(config.model_type).__module__ == parse_config.__module__:
        # it fits by a part of its name, and has sizes of its own
        raise ConfigurationError(
            f"A model of the type {config.model_type!r} was given to Megatron, whose engine builds gpt2, llama, {' and '.join(_READ)}. Add a "
            "parser of your own with add_model_config_to_megatron_parser, or build the model of megatron-core."
        )
    return {}


def _bert(config: Any) -> dict[str, Any]:
    return {
        "ffn_hidden_size": config.intermediate_size,
        "layernorm_epsilon": config.layer_norm_eps,
        "init_method_std": config.initializer_range,
        "activation_func": activation(config.hidden_act),
    }


def _t5(config: Any) -> dict[str, Any]:
    # positions are learned, as in Accelerate's: megatron-core's own attention takes no bias of distances
    return {
        "ffn_hidden_size": config.d_ff,
        "kv_channels": config.d_kv,
        "decoder_num_layers": config.num_decoder_layers,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.layer_norm_epsilon,
        "activation_func": activation(config.dense_act_fn),
        "gated_linear_unit": config.is_gated_act,
        "add_bias_linear": False,
    }


_READ: dict[str, Callable[[Any], dict[str, Any]]] = {"megatron-bert": _bert, "t5": _t5}


def _single(token: Any) -> int | None:
    """The first of several tokens that end a text."""
    found: int | None = token[0] if isinstance(token, list) else token
    return found
