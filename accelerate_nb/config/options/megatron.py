"""The options of Megatron: the fields of its plugin, which are the keys of Accelerate's `megatron_lm_config`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accelerate_nb.config.options.entries import Entries, StrategyOptions, entries_of, option
from accelerate_nb.config.value_types import Boolean, Integer, Number, Text

_WORD = "MEGATRON_LM"
_PREFIX = "megatron_lm_"
_DEGREE, _NUMBER, _TEXT, _YES_NO = Integer(1), Number(), Text(), Boolean()


@dataclass
class MegatronOptions:
    """What a launcher can give to Megatron; what is `None` is read from the variables `MEGATRON_LM_*`."""

    # the defaults are Accelerate's, but for `context_parallel_size`, which is 2 there

    tp_degree: int = option(_DEGREE, 1, launched=1)
    pp_degree: int = option(_DEGREE, 1, launched=1)
    use_custom_fsdp: bool = option(_YES_NO, False)
    overlap_cpu_optimizer_d2h_h2d: bool = option(_YES_NO, False)
    no_load_optim: bool = option(_YES_NO, False)
    eod_mask_loss: bool = option(_YES_NO, False)
    no_save_optim: bool = option(_YES_NO, False)
    optimizer_cpu_offload: bool = option(_YES_NO, False)
    use_precision_aware_optimizer: bool = option(_YES_NO, False)
    decoder_last_pipeline_num_layers: int | None = option(_DEGREE)
    recompute_granularity: str = option(_TEXT, "full")
    recompute_method: str = option(_TEXT, "uniform")
    recompute_num_layers: int = option(_DEGREE, 1)
    attention_backend: bool = option(_YES_NO, True)
    expert_model_parallel_size: int = option(_DEGREE, 1)
    context_parallel_size: int = option(_DEGREE, 1)
    attention_dropout: float = option(_NUMBER, 0.0)
    hidden_dropout: float = option(_NUMBER, 0.0)
    attention_softmax_in_fp32: bool = option(_YES_NO, True)
    expert_tensor_parallel_size: int = option(_DEGREE, 1)
    calculate_per_token_loss: bool = option(_YES_NO, True)
    use_rotary_position_embeddings: bool = option(_YES_NO, True)
    num_micro_batches: int = option(_DEGREE, 1)
    gradient_clipping: float = option(_NUMBER, 1.0, launched=1.0)
    sequence_parallelism: bool = option(_YES_NO, False)
    recompute_activations: bool = option(_YES_NO, False)
    use_distributed_optimizer: bool = option(_YES_NO, False)


OPTIONS = Entries(prefix=_PREFIX, known=entries_of(MegatronOptions, _PREFIX, f"{_WORD}_"))
STRATEGY = StrategyOptions("megatron", _WORD, "ACCELERATE_USE_MEGATRON_LM", "megatron_lm_config", OPTIONS)
# What nothing reads: the default is the only value that is offered.
NOT_READ = (
    *("use_custom_fsdp", "no_load_optim", "overlap_cpu_optimizer_d2h_h2d", "no_save_optim", "optimizer_cpu_offload"),
    *("use_precision_aware_optimizer", "attention_backend", "calculate_per_token_loss"),
    "use_rotary_position_embeddings",
)


def not_offered(options: Mapping[str, Any]) -> list[str]:
    """The options that would change nothing about any training; with or without the prefix of files."""
    given = {name.removeprefix(_PREFIX): value for name, value in options.items() if value is not None}
    return [name for name in NOT_READ if name in given and given[name] != OPTIONS.known[_PREFIX + name].default]


def processes(options: Mapping[str, Any]) -> int:
    """By how many processes the number of processes has to be divisible."""
    tp, pp, cp = (int(options.get(_PREFIX + name) or 1) for name in ("tp_degree", "pp_degree", "context_parallel_size"))
    return tp * pp * cp
