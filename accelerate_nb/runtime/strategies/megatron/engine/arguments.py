"""The arguments of a training by the engine, under the names that Megatron-LM gives them, and the model that they describe."""

from __future__ import annotations

import inspect
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch.nn import Module

from accelerate_nb.errors import ConfigurationError, StateError
from accelerate_nb.runtime.strategies.megatron.conversion import part, stages
from accelerate_nb.runtime.world.registry import at_world_exit

# What steps, models and schedules read where neither the plugin nor the model says it.
_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("iteration", "consumed_train_samples", "consumed_valid_samples", "consumed_test_samples"), 0),
    "seed": 1234,
    # of a model
    "architecture": None,
    "model_return_dict": False,
    "return_logits": False,
    "make_vocab_size_divisible_by": 1,
    "transformer_impl": "local",
    # of a batch
    "megatron_dataset_flag": False,
    "eos_token_id": None,
    "reset_position_ids": False,
    "reset_attention_mask": False,
    "eod_mask_loss": False,
    "seq_length": None,
    "data_path": None,
    "split": "969, 30, 1",
    "data_cache_path": None,
    "check_for_nan_in_loss_and_grad": False,
    # of a schedule
    **dict.fromkeys(("train_iters", "train_samples", "lr_warmup_fraction", "lr_decay_iters", "lr_decay_samples")),
    **dict.fromkeys(("lr_warmup_init", "lr_warmup_iters", "lr_warmup_samples", "min_lr", "weight_decay"), 0.0),
    "lr_decay_style": "linear",
    "lr_wsd_decay_iters": None,
    "lr_wsd_decay_samples": None,
    "lr_wsd_decay_style": "exponential",
    "weight_decay_incr_style": "constant",
    "start_weight_decay": None,
    "end_weight_decay": None,
}
# Arguments that have the name of a field of a `TransformerConfig`, and do not mean it, or are the strategy's.
_NOT_FIELDS = frozenset(
    {
        *("attention_backend", "calculate_per_token_loss", "recompute_granularity", "recompute_method"),
        *("recompute_num_layers", "params_dtype", "fp16", "bf16"),
    }
)


class _Current:
    """The arguments of this process's training, as functions of Megatron-LM's scripts ask for them."""

    arguments: Namespace | None = None


def get_args() -> Namespace:
    """The arguments of the training; `StateError` before a model was prepared."""
    if _Current.arguments is None:
        raise StateError(
            "The arguments of Megatron-LM were asked for before there are any. Give accelerator.prepare(...) a model of transformers "
            "with a MegatronLMPlugin first."
        )
    return _Current.arguments


def initialize(
    accelerator: Any,
    extra_args_provider: Callable[[ArgumentParser], ArgumentParser] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
) -> None:
    """
    Begin a training with these arguments, which `get_args()` returns from now on.

    `extra_args_provider` adds arguments of its own, with their defaults, to a parser. The groups of processes are the `Accelerator`'s.
    """
    extra = {}
    if extra_args_provider is not None:
        extra = vars(extra_args_provider(ArgumentParser(allow_abbrev=False)).parse_known_args([])[0])
    arguments = Namespace(**{**_DEFAULTS, **extra, **(args_defaults or {})})
    mesh = accelerator.strategy.mesh
    arguments.tensor_model_parallel_size = mesh.tp
    arguments.pipeline_model_parallel_size = mesh.pp
    arguments.context_parallel_size = mesh.cp
    arguments.rank, arguments.world_size = accelerator.process_index, accelerator.num_processes
    arguments.params_dtype = accelerator.strategy.precision.dtype
    if getattr(arguments, "padded_vocab_size", None) is None:
        # with the rows that make parts of it equal
        multiple = arguments.make_vocab_size_divisible_by * mesh.tp
        arguments.padded_vocab_size = -(-arguments.orig_vocab_size // multiple) * multiple
    arguments.virtual_pipeline_model_parallel_size = _interleaved_parts(arguments)
    _Current.arguments = arguments
    at_world_exit(_forget)


def finish_mpu_init() -> None:
    """Nothing is left to do: the groups of processes were made with the `Accelerator`."""
    get_args()


def _forget() -> None:
    """The training is over."""
    _Current.arguments = None


def _interleaved_parts(arguments: Namespace) -> int | None:
    """The number of parts of a model that a process has, where stages are interleaved."""
    layers = getattr(arguments, "num_layers_per_virtual_pipeline_stage", None)
    if layers is None:
        return None
    count = arguments.pipeline_model_parallel_size
    if count == 1 or arguments.num_layers % (count * layers):
        raise ConfigurationError(
            f"num_layers_per_virtual_pipeline_stage={layers} was requested for {arguments.num_layers} layers in {count} stages, which "
            "it does not divide. Pass pp_degree=2 or more, and a number of layers that divides those of a stage."
        )
    parts: int = arguments.num_layers // (count * layers)
    return parts if parts > 1 else None


# The model


def model_provider_func(
    pre_process: bool = True,
    post_process: bool = True,
    add_encoder: bool = True,  # noqa: ARG001  # Accelerate's
    add_decoder: bool = True,  # noqa: ARG001  # as above
) -> Module:
    """This process's part of the model that the arguments describe; `pre_process` is of the first stage, `post_process` of the last."""
    return _build(pre_process, post_process)


def chunks(provider: Callable[..., Module] | None) -> list[Module]:
    """The consecutive parts of a model on this process, each as `provider(pre_process, post_process)` builds it, or the arguments."""
    count = get_args().virtual_pipeline_model_parallel_size
    if count is not None and provider is not None and "vp_stage" not in inspect.signature(provider).parameters:
        raise ConfigurationError(
            "num_layers_per_virtual_pipeline_stage was requested with a custom_model_provider_function that takes no vp_stage. Give it "
            "one, the number of the part on this process, or leave the setting out."
        )
    return stages(_build if provider is None else provider, count)


def _build(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> Module:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    args = get_args()
    if args.architecture is None:
        raise StateError(
            "A model of Megatron was to be built before prepare has one of transformers. Call prepare first."
        )
    config = _transformer_config(args)
    layers = None
    if args.transformer_impl == "transformer_engine":
        layers = get_gpt_layer_with_transformer_engine_spec(config.num_moe_experts)
    arguments = {name: getattr(args, name, value) for name, value in args.architecture.arguments.items()}
    return part(arguments, args.padded_vocab_size, config, layers, pre_process, post_process, vp_stage)


def _transformer_config(args: Namespace) -> Any:
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
        **{name: value for name, value in vars(args).items() if name in names},
        "num_layers_in_last_pipeline_stage": getattr(args, "decoder_last_pipeline_num_layers", None),
    }
    if getattr(args, "recompute_activations", False):
        recomputed = ("recompute_granularity", "recompute_method", "recompute_num_layers")
        settings.update({name: getattr(args, name) for name in recomputed})
    if args.virtual_pipeline_model_parallel_size is not None and args.pipeline_model_parallel_size == 2:
        # messages of a stage to the next and to the former one go to the same process, and would be mixed up
        settings.update(overlap_p2p_comm=True, batch_p2p_comm=False)
    return TransformerConfig(**settings)


def innermost(chunk: Module) -> Module:
    """A part of a model inside of what Megatron puts around it."""
    while isinstance(inner := getattr(chunk, "module", None), Module):
        chunk = inner
    return chunk
