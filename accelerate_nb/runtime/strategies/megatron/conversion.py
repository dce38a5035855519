"""GPT-2 and Llama of transformers as models of megatron-core, and the complete weights of such models back; both ways are exact."""

from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, ModuleList, functional

from accelerate_nb.errors import ConfigurationError, MissingExtraError, StateError
from accelerate_nb.runtime.strategies.megatron.train_steps import build_part, stages
from accelerate_nb.runtime.training.unwrap import bare


@dataclass(frozen=True)
class RowOrder:
    """The order of the rows of a weight of Megatron among those of transformers' weights, which have `sizes` rows one after the other."""

    # for each row of Megatron the number of the row of transformers
    order: Tensor
    sizes: list[int]
    # the configuration that has them, in words
    described: str
    # whether Megatron may have more rows, for equal parts
    is_padded: bool = False

    def check(self, count: int, where: str) -> None:
        """Raise a `ConfigurationError` for another number of rows than those of transformers."""
        if count != (wanted := sum(self.sizes)):
            raise ConfigurationError(
                f"A configuration with {self.described} was passed, which are {wanted} rows, but {where} has {count}. Pass the configuration "
                "of the model that it was made of."
            )


@dataclass(frozen=True)
class ConvertedWeight:
    """A weight of Megatron with the rows of tensors of transformers, (inputs, outputs) if `is_transposed`; `tied` is a second name."""

    name: str
    sources: tuple[str, ...]
    rows: RowOrder | None = None
    is_transposed: bool = False
    tied: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """All names in transformers."""
        return self.sources if self.tied is None else (*self.sources, self.tied)

    def join(self, source: Mapping[str, Tensor]) -> Tensor:
        """Megatron's tensor, of weights of transformers."""
        tensors = [source[name].detach() for name in self.sources]
        joined = torch.cat([tensor.t() if self.is_transposed else tensor for tensor in tensors])
        if self.rows is None:
            return joined
        self.rows.check(len(joined), f"{' and '.join(self.sources)} of the model of transformers")
        return joined[self.rows.order.to(joined.device)]

    def split(self, tensor: Tensor) -> dict[str, Tensor]:
        """The tensors of transformers by their names, of Megatron's; each has memory of its own."""
        parts: Sequence[Tensor] = tensor.chunk(len(self.sources))
        if self.rows is not None:
            count = sum(self.rows.sizes)
            found_count = min(len(tensor), count) if self.rows.is_padded else len(tensor)
            self.rows.check(found_count, f"{self.name} of the model of Megatron")
            # the first of equal rows
            parts = tensor[self.rows.order.argsort(stable=True)[:count]].split(self.rows.sizes)
        found = [(part.t() if self.is_transposed else part).contiguous().clone() for part in parts]
        return dict(zip(self.names, found if self.tied is None else found * 2, strict=True))


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "relu": functional.relu,
    "silu": functional.silu,
    "swish": functional.silu,
    **dict.fromkeys(
        ("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh"), partial(functional.gelu, approximate="tanh")
    ),
}


# Megatron's name of each complete weight, and those of transformers whose rows it has: # is the number of a layer, * stands for
# `weight`, and for `bias` where layers have one.
_GPT2 = {
    "embedding.word_embeddings.weight": ("transformer.wte.weight",),
    "output_layer.weight": ("lm_head.weight",),
    "embedding.position_embeddings.weight": ("transformer.wpe.weight",),
    "decoder.final_layernorm.*": ("transformer.ln_f.*",),
    "decoder.layers.#.self_attention.linear_qkv.layer_norm_*": ("transformer.h.#.ln_1.*",),
    "decoder.layers.#.self_attention.linear_qkv.*": ("transformer.h.#.attn.c_attn.*",),
    "decoder.layers.#.self_attention.linear_proj.*": ("transformer.h.#.attn.c_proj.*",),
    "decoder.layers.#.mlp.linear_fc1.layer_norm_*": ("transformer.h.#.ln_2.*",),
    "decoder.layers.#.mlp.linear_fc1.*": ("transformer.h.#.mlp.c_fc.*",),
    "decoder.layers.#.mlp.linear_fc2.*": ("transformer.h.#.mlp.c_proj.*",),
}
_LLAMA = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight",),
    "output_layer.weight": ("lm_head.weight",),
    "decoder.final_layernorm.weight": ("model.norm.weight",),
    "decoder.layers.#.self_attention.linear_qkv.layer_norm_weight": ("model.layers.#.input_layernorm.weight",),
    "decoder.layers.#.self_attention.linear_qkv.*": tuple(f"model.layers.#.self_attn.{kind}_proj.*" for kind in "qkv"),
    "decoder.layers.#.self_attention.linear_proj.*": ("model.layers.#.self_attn.o_proj.*",),
    "decoder.layers.#.mlp.linear_fc1.layer_norm_weight": ("model.layers.#.post_attention_layernorm.weight",),
    "decoder.layers.#.mlp.linear_fc1.*": ("model.layers.#.mlp.gate_proj.*", "model.layers.#.mlp.up_proj.*"),
    "decoder.layers.#.mlp.linear_fc2.*": ("model.layers.#.mlp.down_proj.*",),
}


@dataclass(frozen=True)
class Architecture:
    """A transformers configuration in Megatron: `settings` of a `TransformerConfig`, `arguments` of a `GPTModel`, `names` of weights."""

    settings: Mapping[str, Any]
    arguments: Mapping[str, Any]
    names: Mapping[str, tuple[str, ...]]
    vocab_size: int
    embedding_dropout: float = 0.0

    def weights(self, words: int) -> list[ConvertedWeight]:
        """The complete weights, for so many rows of words."""
        heads = self.settings["num_attention_heads"]
        channels = self.settings.get("kv_channels", self.settings["hidden_size"] // heads)
        groups = self.settings.get("num_query_groups", heads)
        # queries, keys and values stand one after the other in transformers; Megatron has a group of heads after the other
        counts = [count * channels for count in (heads, groups, groups)]
        of_kinds = torch.arange(sum(counts), device="cpu").split(counts)
        of_heads = torch.cat([part.view(groups, -1) for part in of_kinds], 1).flatten()
        described = f"{heads} heads of {channels} channels and {groups} of keys"
        # rows for equal parts repeat the last word's, as Megatron-LM's converters have it: zeros would win over words whose logits are
        # all negative, as those of GPT-2 are
        of_words = torch.arange(words, device="cpu").clamp(max=self.vocab_size - 1)
        parts = ("weight", "bias") if self.settings.get("add_bias_linear", True) else ("weight",)
        is_tied = self.arguments["share_embeddings_and_output_weights"]
        found = []
        for name, sources in self.names.items():
            if is_tied and name == "output_layer.weight":
                continue
            rows = None
            if name.endswith("linear_qkv.*"):
                rows = RowOrder(of_heads, counts if len(sources) > 1 else [sum(counts)], described)
            elif name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                rows = RowOrder(of_words, [self.vocab_size], f"vocab_size={self.vocab_size}", is_padded=True)
            tied = "lm_head.weight" if is_tied and name == "embedding.word_embeddings.weight" else None
            layers = range(self.settings["num_layers"]) if "#" in name else range(1)
            for layer, part in product(layers, parts if "*" in name else parts[:1]):
                own, *of_transformers = (text.replace("#", str(layer)).replace("*", part) for text in (name, *sources))
                # `Conv1D` of GPT-2, whose names begin so
                is_transposed = part == "weight" and ".c_" in sources[0]
                found.append(ConvertedWeight(own, tuple(of_transformers), rows, is_transposed, tied))
        return found


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function of an activation by its name in transformers."""
    if name not in _ACTIVATIONS:
        raise ConfigurationError(
            f"A model with the activation {name!r} was to become one of Megatron, where {', '.join(_ACTIVATIONS)} are known here. Take a "
            "model with one of them."
        )
    return _ACTIVATIONS[name]


def refuse(kind: str, config: Any, refused: Mapping[str, bool]) -> None:
    """Raise `ConfigurationError` that names the settings of a configuration for which Megatron has no counterpart."""
    if names := [f"{name}={getattr(config, name, None)!r}" for name, is_refused in refused.items() if is_refused]:
        raise ConfigurationError(
            f"A {kind} with {', '.join(names)} was to become a model of Megatron, whose layers do not compute that. Take a model without "
            "it, or train this one with strategy='fsdp' or 'tp'."
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
    return Architecture(settings, arguments, _GPT2, config.vocab_size, config.embd_pdrop)


# What Megatron computes with of Llama 3's scaling, whose factor alone is an argument of `GPTModel`.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def llama(config: Any) -> Architecture:
    """The architecture of a `LlamaConfig`; `ConfigurationError` names what Megatron does not compute."""
    refuse("Llama", config, {"attention_bias": config.attention_bias != config.mlp_bias})
    # transformers keeps rotary embeddings in `rope_parameters` from version 5 on
    found = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    rotation: dict[str, Any] = {"rotary_base": found.get("rope_theta") or config.rope_theta}
    kind = found.get("rope_type", "default")
    if kind == "linear":
        rotation["seq_len_interpolation_factor"] = found["factor"]
    elif kind == "llama3" and all(found.get(name) == value for name, value in _LLAMA3.items()):
        rotation |= {"rope_scaling": True, "rope_scaling_factor": found["factor"]}
    elif kind != "default":
        raise ConfigurationError(
            f"A Llama with the rotary embeddings {found} was to become a model of Megatron, which computes 'default', 'linear', and 'llama3' "
            f"with {_LLAMA3}. Take a model with one of these."
        )
    settings = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
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
        **rotation,
    }
    return Architecture(settings, arguments, _LLAMA, config.vocab_size)


_NAMED_FIRST = 8


class ConvertedWeights(UserDict[str, Tensor]):
    """Weights of transformers by Megatron's names; each is put together when it is read, so that a model is never there twice."""

    def __init__(self, weights: Sequence[ConvertedWeight], source: Mapping[str, Tensor]) -> None:
        super().__init__()
        _compare({name for weight in weights for name in weight.names}, source, "transformers")
        self.data: dict[str, Any] = {weight.name: weight for weight in weights}
        self._source = source

    def __getitem__(self, name: str) -> Tensor:
        joined: Tensor = self.data[name].join(self._source)
        return joined


def _compare(wanted: set[str], found: Mapping[str, Tensor], library: str) -> None:
    missing, unknown = sorted(wanted - set(found)), sorted(set(found) - wanted)
    if missing or unknown:
        said = [
            f"{word} {len(names)}, such as {', '.join(names[:_NAMED_FIRST])}"
            for word, names in (("it lacks", missing), ("it has beyond them", unknown))
            if names
        ]
        raise ConfigurationError(
            f"A model of {library} was to be converted, whose weights are not those of its configuration: {', and '.join(said)}. Pass a "
            "model without adapters or other layers of its own, and its own configuration."
        )


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
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    from accelerate_nb.runtime.strategies.megatron.checkpoint import load_complete
    from accelerate_nb.runtime.strategies.megatron.model_parallel import degrees

    config: Any = getattr(model, "config", None)
    architecture = architecture_of(config)
    if not is_converted(model):
        raise ConfigurationError(
            f"A {type(model).__name__} was to become a model of Megatron, but a model that predicts words is converted: "
            f"{_FAMILIES[config.model_type][0]}. Load it "
            "with AutoModelForCausalLM."
        )
    if not parallel_state.model_parallel_is_initialized():
        raise StateError(
            "A model was to become one of Megatron, but there are no groups of Megatron yet. Make the Accelerator with "
            "strategy='megatron' or a MegatronLMPlugin before."
        )
    split = degrees()
    multiple = make_vocab_size_divisible_by * split["tp"]
    words = -(-config.vocab_size // multiple) * multiple
    names = {"tp": "tensor_model", "pp": "pipeline_model", "cp": "context", "ep": "expert_model"}
    described = TransformerConfig(
        **{
            **architecture.settings,
            **{f"{names[axis]}_parallel_size": degree for axis, degree in split.items()},
            **dict.fromkeys(("params_dtype", "pipeline_dtype"), next(model.parameters()).dtype),
            **settings,
        }
    )
    provider = partial(build_part, architecture.arguments, words, described, layer_spec)
    parts = stages(provider, described.virtual_pipeline_model_parallel_size)
    first: Any = parts[0]
    if first.pre_process and "hidden_dropout" not in settings:
        # Megatron takes that of layers for embeddings, too, which have a probability of their own
        first.embedding.embedding_dropout.p = architecture.embedding_dropout
    found: Module = first if len(parts) == 1 else ModuleList(parts)
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

    from accelerate_nb.runtime.strategies.megatron.checkpoint import complete_state

    architecture = architecture_of(config)
    is_main = dist.get_rank() == 0
    complete = complete_state(bare(model), is_kept=is_main)
    if not is_main:
        return {}
    weights = architecture.weights(config.vocab_size)
    _compare({weight.name for weight in weights}, complete, "Megatron")
    return {name: part for weight in weights for name, part in weight.split(complete[weight.name]).items()}


def architecture_of(config: Any) -> Architecture:
    """What a transformers configuration is in Megatron; `ConfigurationError` of a type that is not converted."""
    kind = getattr(config, "model_type", None)
    if kind not in _FAMILIES:
        known = " and ".join(f"{name!r} ({model})" for name, (model, _) in _FAMILIES.items())
        raise ConfigurationError(
            f"A model of the type {kind!r} was to be converted for Megatron, where {known} can be. Take one of them, build the model of "
            "megatron-core's layers yourself, or train this one with strategy='fsdp' or 'tp'."
        )
    return _FAMILIES[kind][1](config)


def is_converted(model: Module) -> bool:
    """Whether a transformers model of a known type is of the class whose weights are converted."""
    return _FAMILIES[model.config.model_type][0] in {base.__name__ for base in type(model).__mro__}  # type: ignore[union-attr, index]  # transformers'


def _check_installed() -> None:
    if find_spec("megatron") is None:
        raise MissingExtraError(
            "A model was to be converted for Megatron, and megatron-core is not installed: pip install 'accelerate-nb[megatron]'"
        )
