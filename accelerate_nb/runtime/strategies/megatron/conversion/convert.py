"""A transformers model as this process's part of a model of megatron-core, and the complete weights of such a model back."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from accelerate_nb.errors import ConfigurationError, MissingExtraError, StateError
from accelerate_nb.runtime.strategies.megatron.conversion.converted_weights import (
    ConvertedWeights,
    by_transformers_names,
)
from accelerate_nb.runtime.strategies.megatron.conversion.family import Architecture
from accelerate_nb.runtime.strategies.megatron.conversion.gpt2 import gpt2
from accelerate_nb.runtime.strategies.megatron.conversion.llama import llama
from accelerate_nb.runtime.training.unwrap import bare

# By `model_type`: the class that is converted, and its architecture.
_FAMILIES: dict[str, tuple[str, Callable[[Any], Architecture]]] = {
    "gpt2": ("GPT2LMHeadModel", gpt2),
    "llama": ("LlamaForCausalLM", llama),
}


def megatron_from_transformers(
    model: Module, *, layer_spec: Any = None, make_vocab_size_divisible_by: int = 1, **settings: Any
) -> Module:
    """
    This process's part of a `GPTModel` of megatron-core with the weights of a transformers model, which stays as it was.

        accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(tp_degree=2))
        model = megatron_from_transformers(AutoModelForCausalLM.from_pretrained("gpt2"), attention_dropout=0.0)

    A `GPT2LMHeadModel` or a `LlamaForCausalLM`, with the same weights on all processes, after the `Accelerator` was made. Called with
    tokens, positions and a mask it returns logits of the shape (samples, length, words), of which each process along a layer's width
    has some words unless `runtime_gather_output=True` is passed; with `labels` a loss for each token. `settings` are further ones of the
    `TransformerConfig`, over those of the model's configuration; with `virtual_pipeline_model_parallel_size` the parts come as a
    `ModuleList`. `layer_spec` is of megatron-core's own layers, unless another one is passed, such as one of Transformer Engine. Rows
    for words are added up to a multiple of `make_vocab_size_divisible_by` times the processes along a layer's width; they repeat the
    last word's. Raises `ConfigurationError` for a model that Megatron's layers do not compute, `StateError` before an `Accelerator`,
    and `MissingExtraError` without megatron-core.
    """
    _check_installed()
    from accelerate_nb.runtime.strategies.megatron import model_parallel
    from accelerate_nb.runtime.strategies.megatron.complete_state import load_complete
    from accelerate_nb.runtime.strategies.megatron.gpt_model import build

    config: Any = getattr(model, "config", None)
    architecture = _architecture(config)
    name = _FAMILIES[config.model_type][0]
    if name not in {base.__name__ for base in type(model).__mro__}:
        raise ConfigurationError(
            f"A {type(model).__name__} was to become a model of Megatron, but a model that predicts words is converted: {name}. Load it "
            "with AutoModelForCausalLM."
        )
    if not model_parallel.has_groups():
        raise StateError(
            "A model was to become one of Megatron, but there are no groups of Megatron yet. Make the Accelerator with "
            "strategy='megatron' or a MegatronLMPlugin before."
        )
    multiple = make_vocab_size_divisible_by * model_parallel.degrees()["tp"]
    words = -(-config.vocab_size // multiple) * multiple
    dtype = next(model.parameters()).dtype
    found = build(architecture, words, {"params_dtype": dtype, "pipeline_dtype": dtype, **settings}, layer_spec)
    load_complete(found, ConvertedWeights(architecture.weights(words), model.state_dict()))
    return found


def megatron_to_transformers(model: Module, config: Any) -> dict[str, Tensor]:
    """
    The complete weights by the names of transformers, on the main process's CPU; an empty dictionary on the others.

        state = megatron_to_transformers(model, config)
        if accelerator.is_main_process:
            AutoModelForCausalLM.from_config(config).load_state_dict(state)

    `model` is a model of megatron-core of such a configuration, prepared or not; all processes call it. Weights keep their dtype, and
    rows that were added for equal parts are left out. Raises `ConfigurationError` where the weights are not those of `config`.
    """
    _check_installed()
    from accelerate_nb.runtime.strategies.megatron.complete_state import complete_state

    architecture = _architecture(config)
    is_main = dist.get_rank() == 0
    complete = complete_state(bare(model), is_kept=is_main)
    if not is_main:
        return {}
    return by_transformers_names(architecture.weights(config.vocab_size), complete)


def known_architecture(config: Any) -> Architecture | None:
    """What a transformers configuration is in Megatron; `None` of a type that is not converted."""
    family = _FAMILIES.get(config.model_type)
    return None if family is None else family[1](config)


def complete_weights(model: Any, words: int) -> ConvertedWeights | None:
    """The weights of a transformers model by Megatron's names, with so many rows for words; `None` of a class that is not converted."""
    family = _FAMILIES.get(model.config.model_type)
    if family is None or family[0] not in {base.__name__ for base in type(model).__mro__}:
        return None
    return ConvertedWeights(family[1](model.config).weights(words), model.state_dict())


def _architecture(config: Any) -> Architecture:
    kind = getattr(config, "model_type", None)
    if kind not in _FAMILIES:
        known = " and ".join(f"{name!r} ({model})" for name, (model, _) in _FAMILIES.items())
        raise ConfigurationError(
            f"A model of the type {kind!r} was to be converted for Megatron, where {known} can be. Take one of them, build the model of "
            "megatron-core's layers yourself, or train this one with strategy='fsdp' or 'tp'."
        )
    return _FAMILIES[kind][1](config)


def _check_installed() -> None:
    if find_spec("megatron") is None:
        raise MissingExtraError(
            "A model was to be converted for Megatron, and megatron-core is not installed: pip install 'accelerate-nb[megatron]'"
        )
