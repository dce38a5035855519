"""The settings of Megatron-LM, in Accelerate's words, and the arguments of a training under Megatron-LM's names."""

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from accelerate_nb.config.options import megatron
from accelerate_nb.errors import ConfigurationError, NotYetError, StateError
from accelerate_nb.runtime.world.registry import at_world_exit
from accelerate_nb.user_warnings import warn_user

# The names that Megatron-LM gives to these settings, as Accelerate passes them on.
_ARGUMENTS = {
    "tp_degree": "tensor_model_parallel_size",
    "pp_degree": "pipeline_model_parallel_size",
    "sequence_parallelism": "sequence_parallel",
    "gradient_clipping": "clip_grad",
}
_PASSED_ON = (
    *(option.name for option in fields(megatron.MegatronOptions) if option.name != "recompute_activations"),
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
# Of Megatron-LM's own loop and logs, which nothing here has.
_OF_ITS_LOOP = ("pipeline_model_parallel_split_rank", "tensorboard_dir", "set_all_logging_options")


@dataclass
class MegatronLMPlugin(megatron.MegatronOptions):
    """
    The settings of Megatron-LM.

    `tp_degree`, `pp_degree`, `context_parallel_size` and `expert_model_parallel_size` are the numbers of processes that split a model;
    the rest of the processes have copies. A batch is cut in `num_micro_batches` parts.
    What is `None` is read from the variables `MEGATRON_LM_*`, and has Accelerate's default without them, but for
    `context_parallel_size`, which is 1.

    >>> MegatronLMPlugin(tp_degree=2, pp_degree=2, num_micro_batches=4).megatron_lm_default_args["clip_grad"]
    1.0
    """

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
        megatron.OPTIONS.complete(self, os.environ)
        degrees = ("tp_degree", "pp_degree", "context_parallel_size", "expert_model_parallel_size", "num_micro_batches")
        if wrong := [f"{name}={getattr(self, name)}" for name in degrees if getattr(self, name) < 1]:
            raise ConfigurationError(f"{', '.join(wrong)} was requested, but it is 1 at least. Leave it out for 1.")
        self.DDP_impl = "local" if self.pp_degree > 1 or self.use_distributed_optimizer else "torch"
        if self.consumed_samples is not None:
            self.consumed_samples += [0] * (3 - len(self.consumed_samples))
        self.megatron_lm_default_args = {_ARGUMENTS.get(name, name): getattr(self, name) for name in _PASSED_ON}
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


def refuse_unused(plugin: MegatronLMPlugin, *, by_engine: bool = False) -> None:
    """Raise `NotYetError` for a setting that was given and that is not read: by the engine, or for a model that is built in a cell."""
    defaults = {item.name: item.metadata["entry"].default if item.metadata else item.default for item in fields(plugin)}
    given = [name for name, default in defaults.items() if getattr(plugin, name) != default]
    not_read = (*megatron.NOT_READ, *_OF_ITS_LOOP)
    names = [name for name in given if (name in not_read if by_engine else name not in _READ_BY_STEPS)]
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

# What steps, models and schedules read where neither the plugin nor the model says it.
_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("iteration", "consumed_train_samples", "consumed_valid_samples", "consumed_test_samples"), 0),
    "seed": 1234,
    # of a model
    **dict.fromkeys(("architecture", "padded_vocab_size")),
    "model_return_dict": False,
    "make_vocab_size_divisible_by": 1,
    "transformer_impl": "local",
    # of a batch
    **dict.fromkeys(("eos_token_id", "data_path", "data_cache_path")),
    **dict.fromkeys(("reset_position_ids", "reset_attention_mask", "check_for_nan_in_loss_and_grad"), False),
    "split": "969, 30, 1",
    # of an optimizer and a schedule
    **dict.fromkeys(("optimizer", "lr_wsd_decay_iters", "lr_wsd_decay_samples")),
    **dict.fromkeys(("lr_warmup_init", "weight_decay"), 0.0),
    "lr_wsd_decay_style": "exponential",
}


class _Current:
    """The arguments of this process's training, as functions of Megatron-LM's scripts ask for them."""

    arguments: Namespace | None = None


def get_args() -> Namespace:
    """The arguments of the training; `StateError` before a model was prepared."""
    if _Current.arguments is None:
        raise StateError(
            "The arguments of Megatron-LM were asked for before there are any. Give accelerator.prepare a model of transformers first."
        )
    return _Current.arguments


def initialize(
    accelerator: Any,
    extra_args_provider: Callable[[ArgumentParser], ArgumentParser] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
) -> None:
    """
    Begin a training with the plugin's settings and these arguments, which `get_args()` returns from now on.

    `extra_args_provider` adds arguments of its own, with their defaults, to a parser. The groups of processes are the `Accelerator`'s.
    """
    extra = {}
    if extra_args_provider is not None:
        extra = vars(extra_args_provider(ArgumentParser(allow_abbrev=False)).parse_known_args([])[0])
    plugin, mesh = accelerator.strategy.megatron_lm_plugin, accelerator.world.mesh
    settings = {field.name: getattr(plugin, field.name) for field in fields(plugin)}
    arguments = Namespace(**{**_DEFAULTS, **settings, **extra, **(args_defaults or {})})
    arguments.tensor_model_parallel_size, arguments.pipeline_model_parallel_size = mesh.tp, mesh.pp
    arguments.context_parallel_size = mesh.cp
    arguments.rank, arguments.world_size = accelerator.process_index, accelerator.num_processes
    arguments.params_dtype = accelerator.strategy.precision.dtype
    words = getattr(arguments, "orig_vocab_size", 0)
    if arguments.padded_vocab_size is None:
        # with the rows that make parts of it equal
        multiple = arguments.make_vocab_size_divisible_by * mesh.tp
        arguments.padded_vocab_size = -(-words // multiple) * multiple
    elif arguments.padded_vocab_size < words:
        raise ConfigurationError(
            f"padded_vocab_size={arguments.padded_vocab_size} was requested for a vocabulary of {words} words. Pass as many, or more."
        )
    arguments.virtual_pipeline_model_parallel_size = None
    if (layers := arguments.num_layers_per_virtual_pipeline_stage) is not None:
        parts, rest = divmod(arguments.num_layers, mesh.pp * layers)
        if mesh.pp == 1 or rest:
            raise ConfigurationError(
                f"num_layers_per_virtual_pipeline_stage={layers} was requested for {arguments.num_layers} layers in {mesh.pp} stages. Pass a "
                "number that divides those of a stage, and pp_degree=2 or more."
            )
        arguments.virtual_pipeline_model_parallel_size = parts if parts > 1 else None
    _Current.arguments = arguments
    # the training is over
    at_world_exit(lambda: setattr(_Current, "arguments", None))


def finish_mpu_init() -> None:
    """Nothing is left to do: the groups of processes were made with the `Accelerator`."""
    get_args()
