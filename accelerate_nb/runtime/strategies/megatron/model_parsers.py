"""What Megatron-LM has to know of a transformers model: the sizes in its configuration."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.user_warnings import warn_user

# Of a plugin, a model and a batch.
Parser = Callable[[Any, Any, Any], None]
F = TypeVar("F", bound=Callable[..., Any])


class ModelParsers(dict[str, Parser]):
    """The parsers by the types of models that they read, to which people add their own."""


# The one table, under Hugging Face's name.
MODEL_CONFIGS_TO_MEGATRON_PARSERS = ModelParsers()


def parse_config(plugin: Any, model: Any, batch_data: Any) -> None:
    """Have the parser of a model's kind fill the plugin's arguments; `ConfigurationError` where there is none."""
    parser_of(model.config.model_type)(plugin, model, batch_data)


def parser_of(model_type: str) -> Parser:
    """The parser whose name is in a model's type; `ConfigurationError` where there is none."""
    kind = model_type.lower()
    parser = next((parser for name, parser in MODEL_CONFIGS_TO_MEGATRON_PARSERS.items() if name in kind), None)
    if parser is None:
        known = ", ".join(MODEL_CONFIGS_TO_MEGATRON_PARSERS)
        raise ConfigurationError(
            f"Accelerate Megatron-LM integration not supports {kind} model. It knows {known}. Add a parser of your own with "
            "add_model_config_to_megatron_parser, or build the model of megatron-core and pass strategy='megatron'."
        )
    return parser


def add_model_config_to_megatron_parser(model_type: str) -> Callable[[F], F]:
    """
    A decorator: the function reads the configuration of models of this type, and fills a plugin's `megatron_lm_default_args`.

    >>> @add_model_config_to_megatron_parser("mine")
    ... def parse_mine(megatron_lm_plugin, model, batch_data): ...
    >>> del MODEL_CONFIGS_TO_MEGATRON_PARSERS["mine"]
    """

    def add(parser: F) -> F:
        MODEL_CONFIGS_TO_MEGATRON_PARSERS[model_type] = parser

        @functools.wraps(parser)
        def called(*args: Any, **kwargs: Any) -> Any:
            return parser(*args, **kwargs)

        return called  # type: ignore[return-value]  # the same function

    return add


def _length(plugin: Any, own: str, batch_data: Any, longest: int) -> int:
    """The length of sequences: the plugin's, a batch's, or the longest that the model takes."""
    special = getattr(plugin, own)
    if plugin.seq_length is not None and special is not None:
        warn_user(f"Both `seq_length` and `{own}` are set. Using `{own}`. Pass one of them.")
    for length in (special, plugin.seq_length):
        if length is not None:
            return int(length)
    return longest if batch_data is None else int(batch_data["input_ids"].shape[1])


@add_model_config_to_megatron_parser("megatron-bert")
def parse_bert_config(megatron_lm_plugin: Any, model: Any, batch_data: Any) -> None:
    """Read the sizes of a BERT, which is trained on masked words, or on labels of sequences."""
    config = model.config
    megatron_lm_plugin.seq_length = _length(
        megatron_lm_plugin, "encoder_seq_length", batch_data, config.max_position_embeddings
    )
    megatron_lm_plugin.megatron_lm_default_args.update(
        seq_length=megatron_lm_plugin.seq_length,
        model_type_name="bert",
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        max_position_embeddings=config.max_position_embeddings,
        pretraining_flag="maskedlm" in type(model).__name__.lower(),
        orig_vocab_size=config.vocab_size,
        model_return_dict=config.return_dict,
        num_labels=config.num_labels,
    )


@add_model_config_to_megatron_parser("gpt2")
def parse_gpt2_config(megatron_lm_plugin: Any, model: Any, batch_data: Any) -> None:
    """Read the sizes of a GPT-2."""
    config = model.config
    megatron_lm_plugin.seq_length = _length(megatron_lm_plugin, "decoder_seq_length", batch_data, config.n_positions)
    megatron_lm_plugin.megatron_lm_default_args.update(
        seq_length=megatron_lm_plugin.seq_length,
        return_logits=megatron_lm_plugin.return_logits,
        tokenizer_type="GPT2BPETokenizer",
        model_type_name="gpt",
        num_layers=config.n_layer,
        hidden_size=config.n_embd,
        num_attention_heads=config.n_head,
        max_position_embeddings=config.n_positions,
        pretraining_flag=True,
        orig_vocab_size=config.vocab_size,
        model_return_dict=config.return_dict,
    )


@add_model_config_to_megatron_parser("t5")
def parse_t5_config(megatron_lm_plugin: Any, model: Any, batch_data: Any) -> None:
    """Read the sizes of a T5."""
    config = model.config
    longest = getattr(config, "n_positions", 1024)
    if megatron_lm_plugin.encoder_seq_length is None:
        megatron_lm_plugin.encoder_seq_length = longest if batch_data is None else batch_data["input_ids"].shape[1]
    if megatron_lm_plugin.decoder_seq_length is None:
        megatron_lm_plugin.decoder_seq_length = longest if batch_data is None else batch_data["labels"].shape[1]
    megatron_lm_plugin.megatron_lm_default_args.update(
        encoder_seq_length=megatron_lm_plugin.encoder_seq_length,
        decoder_seq_length=megatron_lm_plugin.decoder_seq_length,
        model_type_name="t5",
        num_layers=config.num_layers,
        hidden_size=config.d_model,
        num_attention_heads=config.num_heads,
        max_position_embeddings=longest,
        pretraining_flag=True,
        orig_vocab_size=config.vocab_size,
        model_return_dict=config.return_dict,
    )


@add_model_config_to_megatron_parser("llama")
def parse_llama_config(megatron_lm_plugin: Any, model: Any, batch_data: Any) -> None:
    """Read the sizes of a Llama."""
    _parse_decoder(megatron_lm_plugin, model, batch_data)
    megatron_lm_plugin.megatron_lm_default_args.update(pretraining_flag=True, tokenizer_type="Llama2Tokenizer")


def _parse_decoder(plugin: Any, model: Any, batch_data: Any) -> None:
    config = model.config
    if plugin.seq_length is None:
        own = getattr(config, "max_sequence_length", None)
        longest = config.max_position_embeddings
        plugin.seq_length = own or _length(plugin, "decoder_seq_length", batch_data, longest)
    plugin.megatron_lm_default_args.update(
        return_logits=plugin.return_logits,
        model_type_name="gpt",
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        orig_vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        seq_length=plugin.seq_length,
        model_return_dict=config.return_dict,
    )
