"""The settings of Megatron-LM: its plugin, of which many fields are the keys of Accelerate's `megatron_lm_config`."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from accelerate_nb.config.options.entries import Entries, StrategyOptions, entries_of, option
from accelerate_nb.config.value_types import Boolean, Integer, Number, Text
from accelerate_nb.errors import ConfigurationError, NotYetError
from accelerate_nb.user_warnings import warn_user

_WORD = "MEGATRON_LM"
_PREFIX = "megatron_lm_"
_DEGREE, _NUMBER, _TEXT, _YES_NO = Integer(1), Number(), Text(), Boolean()

# The names that Megatron-LM gives to these settings, as Accelerate passes them on.
_ARGUMENTS = {
    "tp_degree": "tensor_model_parallel_size",
    "pp_degree": "pipeline_model_parallel_size",
    "sequence_parallelism": "sequence_parallel",
    "gradient_clipping": "clip_grad",
}
# What is passed on beside the options.
_PASSED_ON = (
    *("DDP_impl", "pipeline_model_parallel_split_rank", "num_layers_per_virtual_pipeline_stage", "consumed_samples"),
    *("no_wd_decay_cond", "scale_lr_cond", "lr_mult", "megatron_dataset_flag", "eval_iters", "eval_interval"),
)
_OF_SCHEDULES = (
    *("train_iters", "lr_warmup_iters", "train_samples", "lr_warmup_samples", "lr_decay_iters", "lr_decay_samples"),
    *("lr_warmup_fraction", "lr_decay_style", "weight_decay_incr_style", "start_weight_decay", "end_weight_decay"),
    "min_lr",
)
# What the training of a model of megatron-core reads; another setting is in its `TransformerConfig`, or of the engine.
_READ_BY_STEPS = (
    *("tp_degree", "pp_degree", "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
    *("num_micro_batches", "gradient_clipping", "sequence_parallelism", "use_distributed_optimizer"),
)
# What nothing reads: the default is the only value that is offered.
_NOT_READ = (
    *("use_custom_fsdp", "no_load_optim", "overlap_cpu_optimizer_d2h_h2d", "no_save_optim", "optimizer_cpu_offload"),
    *("use_precision_aware_optimizer", "attention_backend", "calculate_per_token_loss"),
    "use_rotary_position_embeddings",
    # of Megatron-LM's own loop and logs
    *("pipeline_model_parallel_split_rank", "tensorboard_dir", "set_all_logging_options"),
)


@dataclass
class MegatronLMPlugin:
    """
    The settings of Megatron-LM.

    `tp_degree`, `pp_degree`, `context_parallel_size` and `expert_model_parallel_size` are the numbers of processes that split a model;
    the rest of the processes have copies. A batch is cut in `num_micro_batches` parts.
    What is `None` is read from the variables `MEGATRON_LM_*`, and has Accelerate's default without them, but for
    `context_parallel_size`, which is 1.

    >>> MegatronLMPlugin(tp_degree=2, pp_degree=2, num_micro_batches=4).megatron_lm_default_args["clip_grad"]
    1.0
    """

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
    pipeline_model_parallel_split_rank: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    is_train_batch_min: bool = True
    train_iters: int | None = None
    train_samples: int | None = None
    weight_decay_incr_style: str = "constant"
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    lr_decay_style: str = "linear"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_warmup_iters: int | None = None
    lr_warmup_samples: int | None = None
    lr_warmup_fraction: float | None = None
    min_lr: float = 0
    consumed_samples: list[int] | None = None
    no_wd_decay_cond: Callable[..., Any] | None = None
    scale_lr_cond: Callable[..., Any] | None = None
    lr_mult: float = 1.0
    megatron_dataset_flag: bool = False
    seq_length: int | None = None
    encoder_seq_length: int | None = None
    decoder_seq_length: int | None = None
    tensorboard_dir: str | None = None
    set_all_logging_options: bool = False
    eval_iters: int = 100
    eval_interval: int = 1000
    return_logits: bool = False
    custom_train_step_class: Any = None
    custom_train_step_kwargs: dict[str, Any] | None = None
    custom_model_provider_function: Callable[..., Any] | None = None
    custom_prepare_model_function: Callable[..., Any] | None = None
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = None
    custom_get_batch_function: Callable[..., Any] | None = None
    custom_loss_function: Callable[..., Any] | None = None
    other_megatron_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        OPTIONS.complete(self, os.environ)
        degrees = ("tp_degree", "pp_degree", "context_parallel_size", "expert_model_parallel_size", "num_micro_batches")
        if wrong := [f"{name}={getattr(self, name)}" for name in degrees if getattr(self, name) < 1]:
            raise ConfigurationError(f"{', '.join(wrong)} was requested, but it is 1 at least. Leave it out for 1.")
        self.DDP_impl = "local" if self.pp_degree > 1 or self.use_distributed_optimizer else "torch"
        if self.consumed_samples is not None:
            self.consumed_samples += [0] * (3 - len(self.consumed_samples))
        options = [item.name for item in fields(self) if item.metadata and item.name != "recompute_activations"]
        self.megatron_lm_default_args = {
            _ARGUMENTS.get(name, name): getattr(self, name) for name in (*options, *_PASSED_ON)
        }
        if self.tensorboard_dir is not None:
            self.megatron_lm_default_args["tensorboard_dir"] = self.tensorboard_dir
        if self.other_megatron_args is not None:
            self.megatron_lm_default_args.update(self.other_megatron_args)

    def set_network_size_args(self, model: Any, batch_data: Any = None) -> None:
        """Take layers, widths and the length of sequences of a GPT-2 or a Llama of transformers; `ConfigurationError` for another type."""
        kind = model.config.model_type
        if kind not in MODEL_CONFIGS_TO_MEGATRON_PARSERS:
            raise ConfigurationError(
                f"A model of the type {kind!r} was given to Megatron, which trains {' and '.join(MODEL_CONFIGS_TO_MEGATRON_PARSERS)} of "
                "transformers. Build it of megatron-core, or train this one with strategy='fsdp'."
            )
        MODEL_CONFIGS_TO_MEGATRON_PARSERS[kind](self, model, batch_data)

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Compute in this type."""
        if mixed_precision == "bf16":
            self.DDP_impl = self.megatron_lm_default_args["DDP_impl"] = "local"
        if mixed_precision in {"bf16", "fp16"}:
            self.megatron_lm_default_args[mixed_precision] = True

    def set_training_args(self, micro_batch_size: int, dp_degree: int) -> None:
        """Take so many samples in each part of a batch, on so many copies."""
        self.data_parallel_size, self.micro_batch_size = dp_degree, micro_batch_size
        self.global_batch_size = dp_degree * micro_batch_size * self.num_micro_batches
        sizes = ("data_parallel_size", "micro_batch_size", "global_batch_size")
        self.megatron_lm_default_args.update({name: getattr(self, name) for name in sizes})

    def set_optimizer_type(self, optimizer: Any) -> None:
        """Step as this optimizer of torch does; `ConfigurationError` for one that is neither Adam nor SGD."""
        name, defaults, arguments = type(optimizer).__name__.lower(), optimizer.defaults, self.megatron_lm_default_args
        if "adam" in name:
            arguments["optimizer"] = "adam"
            arguments["adam_beta1"], arguments["adam_beta2"] = defaults["betas"]
            arguments["adam_eps"] = defaults["eps"]
        elif "sgd" in name:
            arguments["optimizer"] = "sgd"
            arguments["sgd_momentum"] = defaults["momentum"]
        else:
            raise ConfigurationError(
                f"Optimizer {name} is not supported by Megatron-LM. Pass one of Adam, AdamW and SGD, or train with strategy='megatron'."
            )
        arguments["lr"], arguments["weight_decay"] = defaults["lr"], defaults["weight_decay"]

    def set_scheduler_args(self, scheduler: Any) -> None:
        """Take the numbers of steps of a `MegatronLMDummyScheduler`, which are those of one process."""
        copies = self.megatron_lm_default_args["data_parallel_size"]
        numbers = (("train", scheduler.total_num_steps, None), ("lr_warmup", scheduler.warmup_num_steps, 0))
        for kind, steps, no_samples in numbers:
            iters, samples = f"{kind}_iters", f"{kind}_samples"
            if getattr(self, iters) is None:
                if getattr(self, samples) is not None:
                    warn_user(
                        f"Ignoring `{samples}` as `{iters}` based on scheduler is being used for training. Pass one of them."
                    )
                setattr(self, iters, steps // copies)
                setattr(self, samples, no_samples)
        self.megatron_lm_default_args.update({name: getattr(self, name) for name in _OF_SCHEDULES})

    def set_tensorboard_logging_options(self) -> None:
        """Log whatever can be logged; an `Accelerator`'s trackers do, so that there is nothing to set here."""


OPTIONS = Entries(prefix=_PREFIX, known=entries_of(MegatronLMPlugin, _PREFIX, f"{_WORD}_"))
STRATEGY = StrategyOptions("megatron", _WORD, "ACCELERATE_USE_MEGATRON_LM", "megatron_lm_config", OPTIONS)


def not_offered(options: Mapping[str, Any]) -> list[str]:
    """The options that would change nothing about any training; with or without the prefix of files."""
    given = {name.removeprefix(_PREFIX): value for name, value in options.items() if value is not None}
    return [name for name in _NOT_READ if name in given and given[name] != OPTIONS.known[_PREFIX + name].default]


def processes(options: Mapping[str, Any]) -> int:
    """By how many processes the number of processes has to be divisible."""
    tp, pp, cp = (int(options.get(_PREFIX + name) or 1) for name in ("tp_degree", "pp_degree", "context_parallel_size"))
    return tp * pp * cp


def refuse_unused(plugin: MegatronLMPlugin, *, by_engine: bool = False) -> None:
    """Raise `NotYetError` for a setting that was given and that is not read: by the engine, or for a model that is built in a cell."""
    defaults = {item.name: item.metadata["entry"].default if item.metadata else item.default for item in fields(plugin)}
    given = [name for name, default in defaults.items() if getattr(plugin, name) != default]
    names = [name for name in given if (name in _NOT_READ if by_engine else name not in _READ_BY_STEPS)]
    if names:
        instead = "Leave it out." if by_engine else "Write it in the model's TransformerConfig where that has it."
        raise NotYetError(
            f"MegatronLMPlugin({', '.join(f'{name}=...' for name in names)}) was requested, which nothing reads in this training. {instead}"
        )


def parse_gpt2_config(megatron_lm_plugin: Any, model: Any, batch_data: Any) -> None:
    """Read the sizes of a GPT-2."""
    plugin, config = megatron_lm_plugin, model.config
    if plugin.seq_length is not None and plugin.decoder_seq_length is not None:
        warn_user("Both `seq_length` and `decoder_seq_length` are set. Using `decoder_seq_length`. Pass one of them.")
    sizes = (config.n_layer, config.n_embd, config.n_head, config.n_positions)
    _take_sizes(plugin, config, batch_data, plugin.decoder_seq_length or plugin.seq_length, sizes, "GPT2BPETokenizer")


def parse_llama_config(megatron_lm_plugin: Any, model: Any, batch_data: Any) -> None:
    """Read the sizes of a Llama."""
    plugin, config = megatron_lm_plugin, model.config
    length = plugin.seq_length or getattr(config, "max_sequence_length", None) or plugin.decoder_seq_length
    sizes = (config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.max_position_embeddings)
    _take_sizes(plugin, config, batch_data, length, sizes, "Llama2Tokenizer")


def _take_sizes(
    plugin: Any, config: Any, batch_data: Any, length: int | None, sizes: tuple[int, ...], tokenizer: str
) -> None:
    """Note the sizes, and a length of sequences: the given one, a batch's, or the longest that the model takes."""
    names = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
    plugin.seq_length = int(length or (sizes[-1] if batch_data is None else batch_data["input_ids"].shape[1]))
    plugin.megatron_lm_default_args.update(
        zip(names, sizes, strict=True),
        seq_length=plugin.seq_length,
        return_logits=plugin.return_logits,
        tokenizer_type=tokenizer,
        model_type_name="gpt",
        pretraining_flag=True,
        orig_vocab_size=config.vocab_size,
        model_return_dict=config.return_dict,
    )


# Hugging Face's name: what reads the sizes of a model, by its type.
MODEL_CONFIGS_TO_MEGATRON_PARSERS = MappingProxyType({"gpt2": parse_gpt2_config, "llama": parse_llama_config})
