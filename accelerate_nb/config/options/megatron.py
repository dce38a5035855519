"""The options of Megatron, under the keys of Accelerate's `megatron_lm_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate_nb.config.options.entries import Entries, Entry
from accelerate_nb.config.value_types import Boolean, Integer, Number, Text, ValueType

_WORD = "MEGATRON_LM"
_PREFIX = "megatron_lm_"


def _entry(name: str, value_type: ValueType, default: Any = None) -> tuple[str, Entry]:
    return _PREFIX + name, Entry(value_type, f"MEGATRON_LM_{name.upper()}", default)


_DEGREE = Integer(1)
# Accelerate's launcher sets these three in any case.
_KNOWN: dict[str, Entry] = dict(
    (
        _entry("tp_degree", _DEGREE, 1),
        _entry("pp_degree", _DEGREE, 1),
        _entry("gradient_clipping", Number(), 1.0),
        _entry("num_micro_batches", _DEGREE),
        _entry("sequence_parallelism", Boolean()),
        _entry("use_distributed_optimizer", Boolean()),
        _entry("context_parallel_size", _DEGREE),
        _entry("expert_model_parallel_size", _DEGREE),
        _entry("expert_tensor_parallel_size", _DEGREE),
        _entry("use_custom_fsdp", Boolean()),
        _entry("no_load_optim", Boolean()),
        _entry("eod_mask_loss", Boolean()),
        _entry("overlap_cpu_optimizer_d2h_h2d", Boolean()),
        _entry("no_save_optim", Boolean()),
        _entry("optimizer_cpu_offload", Boolean()),
        _entry("use_precision_aware_optimizer", Boolean()),
        _entry("decoder_last_pipeline_num_layers", _DEGREE),
        _entry("recompute_activations", Boolean()),
        _entry("recompute_granularity", Text()),
        _entry("recompute_method", Text()),
        _entry("recompute_num_layers", _DEGREE),
        _entry("attention_backend", Boolean()),
        _entry("attention_dropout", Number()),
        _entry("hidden_dropout", Number()),
        _entry("attention_softmax_in_fp32", Boolean()),
        _entry("calculate_per_token_loss", Boolean()),
        _entry("use_rotary_position_embeddings", Boolean()),
    )
)
OPTIONS = Entries(prefix=_PREFIX, known=_KNOWN)
# What nothing reads, with Accelerate's default: the only value that is offered.
_FIXED: dict[str, Any] = {
    "use_custom_fsdp": False,
    "no_load_optim": False,
    "overlap_cpu_optimizer_d2h_h2d": False,
    "no_save_optim": False,
    "optimizer_cpu_offload": False,
    "use_precision_aware_optimizer": False,
    "attention_backend": True,
    "calculate_per_token_loss": True,
    "use_rotary_position_embeddings": True,
}
# What the engine of a transformers model reads; another model has it in its `TransformerConfig`.
_OF_ENGINE: dict[str, Any] = {
    "eod_mask_loss": False,
    "decoder_last_pipeline_num_layers": None,
    "recompute_activations": False,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "attention_softmax_in_fp32": True,
}


def variables(options: Mapping[str, Any] | None) -> dict[str, str]:
    """
    The variables through which an `Accelerator` trains with Megatron, as Accelerate's launcher sets them.

    >>> variables({"megatron_lm_tp_degree": 2})["MEGATRON_LM_TP_DEGREE"]
    '2'
    """
    return {"ACCELERATE_USE_MEGATRON_LM": "true", **OPTIONS.variables(options or {})}


def not_offered(options: Mapping[str, Any]) -> list[str]:
    """
    The options that would change nothing about any training; with or without the prefix of files.

    >>> not_offered({"megatron_lm_tp_degree": 2, "megatron_lm_no_save_optim": True, "use_custom_fsdp": False})
    ['no_save_optim']
    """
    return _changed(options, _FIXED)


def of_engine(options: Mapping[str, Any]) -> list[str]:
    """
    The options that change the training of a transformers model alone; with or without the prefix of files.

    >>> of_engine({"megatron_lm_tp_degree": 2, "megatron_lm_hidden_dropout": 0.1, "recompute_num_layers": 1})
    ['hidden_dropout']
    """
    return _changed(options, _OF_ENGINE)


def _changed(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    named = {name.removeprefix(_PREFIX): value for name, value in options.items()}
    return [name for name, value in named.items() if name in defaults and value is not None and value != defaults[name]]


def processes(options: Mapping[str, Any]) -> int:
    """
    By how many processes the number of processes has to be divisible.

    >>> processes({"megatron_lm_tp_degree": 2, "megatron_lm_pp_degree": 4})
    8
    """
    tp, pp, cp = (int(options.get(_PREFIX + name) or 1) for name in ("tp_degree", "pp_degree", "context_parallel_size"))
    return tp * pp * cp


def with_strategy(content: Mapping[str, Any]) -> dict[str, Any]:
    """
    The content of a file for Megatron, in settings.

    >>> with_strategy({"distributed_type": "MEGATRON_LM"})["strategy"]
    'megatron'
    """
    if str(content.get("distributed_type")).upper() != _WORD:
        return dict(content)
    return {**content, "strategy": "megatron"}


def for_accelerate(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a file whose `strategy` is Megatron, as Accelerate's own tools understand it, too."""
    return {**content, "distributed_type": _WORD, "megatron_lm_config": dict(content.get("megatron_lm_config") or {})}
