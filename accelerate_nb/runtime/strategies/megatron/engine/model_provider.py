"""Models of megatron-core, built by the arguments of a training."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch.nn import Module, functional

from accelerate_nb.errors import ConfigurationError, NotYetError
from accelerate_nb.runtime.strategies.megatron.engine.arguments import get_args

Provider = Callable[..., Module]
# Arguments that have the name of a field, and do not mean it, or are the strategy's.
_NOT_FIELDS = frozenset(
    {
        *("attention_backend", "calculate_per_token_loss", "recompute_granularity", "recompute_method"),
        *("recompute_num_layers", "params_dtype", "fp16", "bf16"),
    }
)


def model_provider_func(
    pre_process: bool = True,
    post_process: bool = True,
    add_encoder: bool = True,  # noqa: ARG001  # Accelerate's
    add_decoder: bool = True,  # noqa: ARG001  # as above
) -> Module:
    """This process's part of the model that the arguments describe; `pre_process` is of the first stage, `post_process` of the last."""
    return build(pre_process, post_process)


def build(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> Module:
    """A part of the model, its `vp_stage`-th on this process where stages are interleaved."""
    args = get_args()
    kind = args.model_type_name
    if kind not in _BUILT:
        raise ConfigurationError(
            f"Unsupported model type: {kind}. Megatron builds {', '.join(_BUILT)} here; pass a custom_model_provider_function for another."
        )
    if getattr(args, "sequence_parallel", False) and not (kind == "gpt" and _has_engine_layers(args)):
        raise ConfigurationError(
            "sequence_parallelism=True was requested with megatron-core's own layers, which compute whole sequences. Pass "
            "other_megatron_args={'transformer_impl': 'transformer_engine'} for a model of the type gpt, or leave it out."
        )
    return _BUILT[kind](args, pre_process, post_process, vp_stage)


def _has_engine_layers(args: Namespace) -> bool:
    """Whether a model is to have the layers of Transformer Engine."""
    return getattr(args, "transformer_impl", "local") == "transformer_engine"


def chunks(provider: Provider = build) -> list[Module]:
    """The consecutive parts of a model on this process, each as `provider(pre_process, post_process)` builds it."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.utils import is_vp_first_stage, is_vp_last_stage

    is_first, is_last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    count = get_args().virtual_pipeline_model_parallel_size
    if count is None:
        return [provider(is_first, is_last)]
    if "vp_stage" not in inspect.signature(provider).parameters:
        raise ConfigurationError(
            "num_layers_per_virtual_pipeline_stage was requested with a custom_model_provider_function that takes no vp_stage. Give it "
            "one, the number of the part on this process, or leave the setting out."
        )
    return [
        provider(
            is_first and is_vp_first_stage(stage, count), is_last and is_vp_last_stage(stage, count), vp_stage=stage
        )
        for stage in range(count)
    ]


def innermost(chunk: Module) -> Module:
    """A part of a model inside of what Megatron puts around it."""
    while isinstance(inner := getattr(chunk, "module", None), Module):
        chunk = inner
    return chunk


def transformer_config(args: Namespace, **changes: Any) -> Any:
    """The `TransformerConfig` of the arguments: whichever have the name of one of its fields, and what Megatron-LM makes of others."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    names = {field.name for field in fields(TransformerConfig)} - _NOT_FIELDS
    has_gpu = torch.cuda.is_available()
    settings: dict[str, Any] = {
        # they need a compiler, or kernels of other packages
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": has_gpu,
        "use_cpu_initialization": not has_gpu,
        "pipeline_dtype": args.params_dtype,
    }
    settings.update({name: value for name, value in vars(args).items() if name in names})
    settings["num_layers_in_last_pipeline_stage"] = getattr(args, "decoder_last_pipeline_num_layers", None)
    if args.swiglu:
        settings.update(activation_func=functional.silu, gated_linear_unit=True)
    if getattr(args, "recompute_activations", False):
        settings.update({name: getattr(args, name) for name in ("recompute_granularity", "recompute_method")})
        settings["recompute_num_layers"] = args.recompute_num_layers
    if args.virtual_pipeline_model_parallel_size is not None and args.pipeline_model_parallel_size == 2:
        # messages of a stage to the next and to the former one go to the same process, and would be mixed up
        settings.update(overlap_p2p_comm=True, batch_p2p_comm=False)
    return TransformerConfig(**{**settings, **changes})


def _gpt(args: Namespace, pre_process: bool, post_process: bool, vp_stage: int | None) -> Module:
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel

    config = transformer_config(args)
    if _has_engine_layers(args):
        layers = get_gpt_layer_with_transformer_engine_spec(config.num_moe_experts)
    else:
        layers = get_gpt_layer_local_spec(config.num_moe_experts, normalization=config.normalization)
    return GPTModel(  # type: ignore[no-any-return]  # a module of a package without types
        config=config,
        transformer_layer_spec=layers,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.seq_len_interpolation_factor,
        vp_stage=vp_stage,
    )


def _bert(args: Namespace, pre_process: bool, post_process: bool, vp_stage: int | None) -> Module:
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    if not args.pretraining_flag:
        raise NotYetError(
            "A BERT for labels of sequences was given to Megatron, which megatron-core has no head for. Pass a model for masked words, or "
            "a custom_model_provider_function that builds one."
        )
    return BertModel(  # type: ignore[no-any-return]  # as above
        config=transformer_config(args),
        num_tokentypes=2 if args.bert_binary_head else 0,
        transformer_layer_spec=bert_layer_local_spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        add_binary_head=args.bert_binary_head,
        vp_stage=vp_stage,
    )


def _t5(args: Namespace, pre_process: bool, post_process: bool, vp_stage: int | None) -> Module:
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.models.T5.t5_spec import (
        get_t5_decoder_with_local_block_spec,
        get_t5_encoder_with_local_block_spec,
    )

    if args.pipeline_model_parallel_size > 1 or vp_stage is not None:
        raise NotYetError(
            "pp_degree=2 or more was requested for a T5, whose encoder and decoder are not offered in stages here. Use tp_degree."
        )
    decoder_layers = getattr(args, "decoder_num_layers", args.num_layers)
    return T5Model(  # type: ignore[no-any-return]  # as above
        config=transformer_config(args, num_layers=decoder_layers),
        encoder_config=transformer_config(args),
        transformer_encoder_layer_spec=get_t5_encoder_with_local_block_spec(args.num_layers),
        transformer_decoder_layer_spec=get_t5_decoder_with_local_block_spec(decoder_layers),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
    )


_BUILT: dict[str, Callable[..., Module]] = {"bert": _bert, "gpt": _gpt, "t5": _t5}
