"""GPT-2 and Llama of transformers as models of megatron-core, and the complete weights of such models back; both ways are exact."""

from argparse import Namespace
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, ModuleList, functional
from torch.optim import Optimizer

from accelerate_nb.errors import ConfigurationError, MissingExtraError, StateError
from accelerate_nb.runtime.strategies.megatron.engine import innermost
from accelerate_nb.runtime.strategies.megatron.training import get_args, prepare_optimizer, prepare_scheduler
from accelerate_nb.runtime.training.unwrap import bare

_WORDS, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True)
class ConvertedWeight:
    """A weight of Megatron with the rows of tensors of transformers, which are (inputs, outputs) if `is_transposed`."""

    name: str
    sources: tuple[str, ...]
    is_transposed: bool = False
    # for each row of Megatron the number of the row of transformers, whose weights have `sizes` rows one after the other; the
    # configuration that has them, in words
    order: Tensor | None = None
    sizes: Sequence[int] = ()
    described: str = ""

    def join(self, source: Mapping[str, Tensor]) -> Tensor:
        """Megatron's tensor, of weights of transformers."""
        tensors = [source[name].detach() for name in self.sources]
        joined = torch.cat([tensor.t() if self.is_transposed else tensor for tensor in tensors])
        if self.order is None:
            return joined
        self._check(len(joined), f"{' and '.join(self.sources)} of the model of transformers")
        return joined[self.order.to(joined.device)]

    def split(self, tensor: Tensor) -> dict[str, Tensor]:
        """The tensors of transformers by their names, of Megatron's; each has memory of its own."""
        parts: Sequence[Tensor] = tensor.chunk(len(self.sources))
        if self.order is not None:
            count = sum(self.sizes)
            # those of words may be more, for equal parts
            known = tensor[:count] if self.name in (_WORDS, _HEAD) else tensor
            self._check(len(known), f"{self.name} of the model of Megatron")
            # the first of equal rows
            parts = tensor[self.order.argsort(stable=True)[:count]].split(self.sizes)
        found = [(part.t() if self.is_transposed else part).contiguous().clone() for part in parts]
        return dict(zip(self.sources, found, strict=True))

    def _check(self, count: int, where: str) -> None:
        if count != (wanted := sum(self.sizes)):
            raise ConfigurationError(
                f"A configuration with {self.described} was passed, which are {wanted} rows, but {where} has {count}. Pass the model's own."
            )


_GELU_OF_TANH = partial(functional.gelu, approximate="tanh")
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "relu": functional.relu,
    **dict.fromkeys(("silu", "swish"), functional.silu),
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh"), _GELU_OF_TANH),
}


# Megatron's name of each complete weight, and those of transformers whose rows it has: # is the number of a layer, * stands for
# `weight`, and for `bias` where layers have one.
_GPT2 = {
    _WORDS: ("transformer.wte.weight",),
    _HEAD: ("lm_head.weight",),
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
    _WORDS: ("model.embed_tokens.weight",),
    _HEAD: ("lm_head.weight",),
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
        # rows for equal parts repeat the last word's, as Megatron-LM's converters have it: zeros would win over words whose logits are
        # all negative, as those of GPT-2 are
        of_words = torch.arange(words, device="cpu").clamp(max=self.vocab_size - 1)
        parts = ("weight", "bias") if self.settings.get("add_bias_linear", True) else ("weight",)
        found = []
        for name, sources in self.names.items():
            rows: tuple[Any, ...] = ()
            if name.endswith("linear_qkv.*"):
                sizes = counts if len(sources) > 1 else [sum(counts)]
                rows = (of_heads, sizes, f"{heads} heads of {channels} channels and {groups} of keys")
            elif name in (_WORDS, _HEAD):
                rows = (of_words, [self.vocab_size], f"vocab_size={self.vocab_size}")
            layers = range(self.settings["num_layers"]) if "#" in name else range(1)
            for layer, part in product(layers, parts if "*" in name else parts[:1]):
                own, *of_transformers = (text.replace("#", str(layer)).replace("*", part) for text in (name, *sources))
                # `Conv1D` of GPT-2, whose names begin so
                is_transposed = part == "weight" and ".c_" in sources[0]
                found.append(ConvertedWeight(own, tuple(of_transformers), is_transposed, *rows))
        return found


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function of an activation by its name in transformers."""
    if name not in _ACTIVATIONS:
        raise ConfigurationError(
            f"A model with the activation {name!r} was to become one of Megatron. Take one with {', '.join(_ACTIVATIONS)}."
        )
    return _ACTIVATIONS[name]


def refuse_others(kind: str, config: Any, **known: bool) -> None:
    """Raise `ConfigurationError` that names the settings of a configuration that are not the ones which Megatron computes."""
    if others := [f"{name}={found!r}" for name, value in known.items() if (found := getattr(config, name)) != value]:
        raise ConfigurationError(
            f"A {kind} with {', '.join(others)} was to become a model of Megatron, whose layers do not compute that. Take one without it."
        )


def gpt2(config: Any) -> Architecture:
    """The architecture of a `GPT2Config`; `ConfigurationError` names what Megatron does not compute."""
    attention = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
    refuse_others("GPT-2", config, add_cross_attention=False, **attention)
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
    refuse_others("Llama", config, attention_bias=config.mlp_bias)
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
            f"A Llama with the rotary embeddings {found} was to become a model of Megatron. Take one with 'default', 'linear', or 'llama3' "
            f"and {_LLAMA3}."
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


class ConvertedWeights(UserDict[str, Tensor]):
    """Weights of transformers by Megatron's names; each is put together when it is read, so that a model is never there twice."""

    def __init__(self, weights: Sequence[ConvertedWeight], source: Mapping[str, Tensor]) -> None:
        super().__init__()
        _compare({name for weight in weights for name in weight.sources}, source, "transformers")
        self.data: dict[str, Any] = {weight.name: weight for weight in weights}
        self._source = source

    def __getitem__(self, name: str) -> Tensor:
        joined: Tensor = self.data[name].join(self._source)
        return joined


def _compare(wanted: set[str], found: Mapping[str, Tensor], library: str) -> None:
    lists = {"it lacks": sorted(wanted - set(found)), "it has beyond them": sorted(set(found) - wanted)}
    texts = [f"{how} {len(names)}, such as {', '.join(names[:8])}" for how, names in lists.items() if names]
    if texts:
        raise ConfigurationError(
            f"A model of {library} has other weights than its configuration: {' and '.join(texts)}. Pass both as they were made."
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
    has some words unless `runtime_gather_output=True` is passed; with `labels` a loss for each token. `settings` are of the
    `TransformerConfig`; with `virtual_pipeline_model_parallel_size` the parts come as a `ModuleList`. `layer_spec` is of megatron-core's
    own layers. Rows for words are added up to a multiple of `make_vocab_size_divisible_by` times the processes along a layer's width.
    Raises `ConfigurationError` for a model that Megatron's layers do not compute, and `StateError` before an `Accelerator`.
    """
    if find_spec("megatron") is None:
        raise MissingExtraError(
            "A model was to be converted for Megatron, and megatron-core is not installed: pip install 'accelerate-nb[megatron]'"
        )
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    from accelerate_nb.runtime.strategies.megatron.model_parallel import load_complete

    config: Any = getattr(model, "config", None)
    architecture = architecture_of(config)
    if not is_converted(model):
        raise ConfigurationError(
            f"A {type(model).__name__} was to become a model of Megatron, but a model that predicts words is converted: "
            f"{_FAMILIES[config.model_type][0]}. Load it with AutoModelForCausalLM."
        )
    if not parallel_state.model_parallel_is_initialized():
        raise StateError(
            "A model was to become one of Megatron, but its groups are not there yet. Make the Accelerator with strategy='megatron' before."
        )
    names = ("tensor_model", "pipeline_model", "context", "expert_model")
    split = {f"{name}_parallel_size": getattr(parallel_state, f"get_{name}_parallel_world_size")() for name in names}
    types = dict.fromkeys(("params_dtype", "pipeline_dtype"), next(model.parameters()).dtype)
    described = TransformerConfig(**{**architecture.settings, **split, **types, **settings})
    multiple = make_vocab_size_divisible_by * split["tensor_model_parallel_size"]
    words = -(-config.vocab_size // multiple) * multiple
    provider = partial(build_part, described, layer_spec, vocab_size=words, **architecture.arguments)
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
    from accelerate_nb.runtime.strategies.megatron.model_parallel import complete_state

    architecture = architecture_of(config)
    is_main = dist.get_rank() == 0
    complete = complete_state(bare(model), is_kept=is_main)
    if not is_main:
        return {}
    if is_tied := architecture.arguments["share_embeddings_and_output_weights"]:
        complete[_HEAD] = complete[_WORDS]
    weights = architecture.weights(config.vocab_size)
    _compare({weight.name for weight in weights}, complete, "Megatron")
    state = {name: part for weight in weights for name, part in weight.split(complete[weight.name]).items()}
    if is_tied:
        # one tensor of two names, which safetensors writes once
        (words,), (head,) = architecture.names[_WORDS], architecture.names[_HEAD]
        state[head] = state[words]
    return state


def architecture_of(config: Any) -> Architecture:
    """What a transformers configuration is in Megatron; `ConfigurationError` of a type that is not converted."""
    kind = getattr(config, "model_type", None)
    if kind not in _FAMILIES:
        known = " and ".join(f"{name!r} ({model})" for name, (model, _) in _FAMILIES.items())
        raise ConfigurationError(
            f"A model of the type {kind!r} was to be converted for Megatron, where {known} can be. Take one, or strategy='fsdp' or 'tp'."
        )
    return _FAMILIES[kind][1](config)


def is_converted(model: Module) -> bool:
    """Whether a transformers model of a known type is of the class whose weights are converted."""
    return _FAMILIES[model.config.model_type][0] in {base.__name__ for base in type(model).__mro__}  # type: ignore[union-attr, index]  # transformers'


# The parts of a model on this process


def stages(provider: Callable[..., Module], count: int | None) -> list[Module]:
    """The parts of a model on this process, `count` where stages are interleaved: `provider(is_first, is_last)`, with `vp_stage=` then."""
    from megatron.core import parallel_state

    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    if count is None:
        return [provider(first, last)]
    return [provider(first and stage == 0, last and stage == count - 1, vp_stage=stage) for stage in range(count)]


def build_part(
    config: Any, layer_spec: Any, is_first: bool, is_last: bool, vp_stage: int | None = None, **arguments: Any
) -> Module:
    """A part of a `GPTModel`, of megatron-core's own layers without a `layer_spec`."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    if layer_spec is None:
        cut = {"sequence_parallel": config.sequence_parallel, "context_parallel_size": config.context_parallel_size > 1}
        if names := [name for name, is_cut in cut.items() if is_cut]:
            raise ConfigurationError(
                f"{' and '.join(names)} was requested with megatron-core's own layers, which compute whole sequences. Leave it out, or pass "
                "layer_spec or other_megatron_args={'transformer_impl': 'transformer_engine'} for those of Transformer Engine."
            )
        layer_spec = get_gpt_layer_local_spec(config.num_moe_experts, normalization=config.normalization)
    return GPTModel(  # type: ignore[no-any-return]  # a module of a package without types
        config=config,
        transformer_layer_spec=layer_spec,
        pre_process=is_first,
        post_process=is_last,
        vp_stage=vp_stage,
        **arguments,
    )


def model_provider_func(
    pre_process: bool = True,
    post_process: bool = True,
    add_encoder: bool = True,  # noqa: ARG001  # Accelerate's
    add_decoder: bool = True,  # noqa: ARG001  # as above
    *,
    vp_stage: int | None = None,
) -> Module:
    """
    This process's part of the model that the arguments describe; `pre_process` is of the first stage, `post_process` of the last.

    `vp_stage` is the number of the part on this process, where stages are interleaved.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    args = get_args()
    config = _transformer_config(args)
    is_by_engine = args.transformer_impl == "transformer_engine"
    layers = get_gpt_layer_with_transformer_engine_spec(config.num_moe_experts) if is_by_engine else None
    arguments = {name: getattr(args, name, value) for name, value in args.architecture.arguments.items()}
    arguments["vocab_size"] = args.padded_vocab_size
    return build_part(config, layers, pre_process, post_process, vp_stage, **arguments)


# Arguments that have the name of a field of a `TransformerConfig`, and do not mean it, or are the strategy's.
_NOT_FIELDS = {
    *("attention_backend", "calculate_per_token_loss", "recompute_granularity", "recompute_method"),
    *("recompute_num_layers", "params_dtype", "fp16", "bf16"),
}


def _transformer_config(args: Namespace) -> Any:
    """The `TransformerConfig` of the arguments: whichever have the name of one of its fields, and what Megatron-LM makes of others."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    names = {field.name for field in fields(TransformerConfig)} - _NOT_FIELDS
    has_gpu = torch.cuda.is_available()
    settings: dict[str, Any] = {
        # which needs a compiler
        "bias_dropout_fusion": has_gpu,
        "use_cpu_initialization": not has_gpu,
        "pipeline_dtype": args.params_dtype,
        **{name: value for name, value in vars(args).items() if name in names},
        "num_layers_in_last_pipeline_stage": args.decoder_last_pipeline_num_layers,
    }
    if args.recompute_activations:
        settings["recompute_granularity"] = args.recompute_granularity
        if args.recompute_granularity == "full":
            settings.update(recompute_method=args.recompute_method, recompute_num_layers=args.recompute_num_layers)
    if args.virtual_pipeline_model_parallel_size is not None and args.pipeline_model_parallel_size == 2:
        # messages of a stage to the next and to the former one go to the same process, and would be mixed up
        settings.update(overlap_p2p_comm=True, batch_p2p_comm=False)
    return TransformerConfig(**settings)


def prepare_model_optimizer_scheduler(accelerator: Any) -> tuple[list[Any], Optimizer | None, Any]:
    """
    The parts of a model on this process as Megatron trains them, its optimizer and its schedule, as the arguments describe them.

    The plugin's `custom_model_provider_function(pre_process, post_process)` builds a part where there is one, and its
    `custom_prepare_model_function(provider)` all parts. Without `train_iters` or `train_samples` there is no schedule.
    """
    args, plugin = get_args(), accelerator.state.megatron_lm_plugin
    provider = plugin.custom_model_provider_function
    if plugin.custom_prepare_model_function is None:
        parts = stages(provider or model_provider_func, args.virtual_pipeline_model_parallel_size)
    elif provider is None:
        raise ConfigurationError(
            "You must provide a `custom_model_provider_function` when using a `custom_prepare_model_function`. Pass both."
        )
    else:
        made = plugin.custom_prepare_model_function(provider)
        parts = [innermost(part) for part in (made if isinstance(made, (list, tuple)) else [made])]
    model = accelerator.strategy.trained_chunks(parts)
    optimizer = None if args.optimizer is None else prepare_optimizer(accelerator, model)
    schedule = None if optimizer is None else prepare_scheduler(accelerator, optimizer, None)
    return model, optimizer, schedule
