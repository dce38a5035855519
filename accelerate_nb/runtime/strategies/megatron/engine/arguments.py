"""The arguments of a training by the engine, under the names that Megatron-LM gives them."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from typing import Any

from accelerate_nb.errors import ConfigurationError, StateError
from accelerate_nb.runtime.world.registry import at_world_exit

# What steps, models and schedules read where neither the plugin nor the model says it.
_DEFAULTS: dict[str, Any] = {
    "iteration": 0,
    "consumed_train_samples": 0,
    "consumed_valid_samples": 0,
    "consumed_test_samples": 0,
    "seed": 1234,
    # of a model
    "pretraining_flag": True,
    "model_return_dict": False,
    "return_logits": False,
    "num_labels": 0,
    "bert_binary_head": False,
    "position_embedding_type": "learned_absolute",
    "untie_embeddings_and_output_weights": False,
    "make_vocab_size_divisible_by": 1,
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "swiglu": False,
    "seq_len_interpolation_factor": None,
    "virtual_pipeline_model_parallel_size": None,
    # of a batch
    "megatron_dataset_flag": False,
    "vocab_file": None,
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
    "train_iters": None,
    "train_samples": None,
    "lr_warmup_init": 0.0,
    "lr_warmup_iters": 0,
    "lr_warmup_samples": 0,
    "lr_warmup_fraction": None,
    "lr_decay_iters": None,
    "lr_decay_samples": None,
    "lr_decay_style": "linear",
    "lr_wsd_decay_iters": None,
    "lr_wsd_decay_samples": None,
    "lr_wsd_decay_style": "exponential",
    "min_lr": 0.0,
    "weight_decay": 0.0,
    "weight_decay_incr_style": "constant",
    "start_weight_decay": None,
    "end_weight_decay": None,
}


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
        arguments.padded_vocab_size = _padded(arguments)
    arguments.bert_binary_head = bool(
        getattr(arguments, "model_type_name", "") == "bert" and arguments.pretraining_flag and arguments.num_labels == 2
    )
    arguments.virtual_pipeline_model_parallel_size = _interleaved_parts(arguments)
    _Current.arguments = arguments
    at_world_exit(forget)


def finish_mpu_init() -> None:
    """Nothing is left to do: the groups of processes were made with the `Accelerator`."""
    get_args()


def forget() -> None:
    """The training is over."""
    _Current.arguments = None


def _padded(arguments: Namespace) -> int:
    """The size of the vocabulary with the rows that make parts of it equal."""
    multiple: int = arguments.make_vocab_size_divisible_by * arguments.tensor_model_parallel_size
    size: int = arguments.orig_vocab_size
    return -(-size // multiple) * multiple


def _interleaved_parts(arguments: Namespace) -> int | None:
    """The number of parts of a model that a process has, where stages are interleaved."""
    layers = getattr(arguments, "num_layers_per_virtual_pipeline_stage", None)
    if layers is None:
        return None
    stages = arguments.pipeline_model_parallel_size
    if stages == 1 or arguments.num_layers % (stages * layers):
        raise ConfigurationError(
            f"num_layers_per_virtual_pipeline_stage={layers} was requested for {arguments.num_layers} layers in {stages} stages, which "
            "it does not divide. Pass pp_degree=2 or more, and a number of layers that divides those of a stage."
        )
    parts: int = arguments.num_layers // (stages * layers)
    return parts if parts > 1 else None
