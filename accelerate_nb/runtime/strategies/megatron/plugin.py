"""The settings of Megatron-LM, in Accelerate's words."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from accelerate_nb.config.options import megatron
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.strategies.megatron.model_parsers import parse_config
from accelerate_nb.user_warnings import warn_user

# The names that Megatron-LM gives to these settings, as Accelerate passes them on.
_ARGUMENTS = {
    "tp_degree": "tensor_model_parallel_size",
    "pp_degree": "pipeline_model_parallel_size",
    "sequence_parallelism": "sequence_parallel",
    "gradient_clipping": "clip_grad",
}
_PASSED_ON = (
    *("tp_degree", "pp_degree", "pipeline_model_parallel_split_rank", "num_layers_per_virtual_pipeline_stage"),
    *("DDP_impl", "use_distributed_optimizer", "sequence_parallelism", "gradient_clipping", "num_micro_batches"),
    *("consumed_samples", "no_wd_decay_cond", "scale_lr_cond", "lr_mult", "megatron_dataset_flag", "eval_iters"),
    *("eval_interval", "use_custom_fsdp", "no_load_optim", "eod_mask_loss", "no_save_optim", "optimizer_cpu_offload"),
    *("overlap_cpu_optimizer_d2h_h2d", "use_precision_aware_optimizer", "decoder_last_pipeline_num_layers"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "attention_backend"),
    *("expert_model_parallel_size", "context_parallel_size", "attention_dropout", "hidden_dropout"),
    *("attention_softmax_in_fp32", "expert_tensor_parallel_size", "calculate_per_token_loss"),
    "use_rotary_position_embeddings",
)
_OF_SCHEDULES = (
    *("train_iters", "lr_warmup_iters", "train_samples", "lr_warmup_samples", "lr_decay_iters", "lr_decay_samples"),
    *("lr_warmup_fraction", "lr_decay_style", "weight_decay_incr_style", "start_weight_decay", "end_weight_decay"),
    "min_lr",
)


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
        self._check()
        self.DDP_impl = "local" if self.pp_degree > 1 or self.use_distributed_optimizer else "torch"
        if self.consumed_samples is not None:
            self.consumed_samples += [0] * (3 - len(self.consumed_samples))
        self.megatron_lm_default_args = {_ARGUMENTS.get(name, name): getattr(self, name) for name in _PASSED_ON}
        if self.tensorboard_dir is not None:
            self.megatron_lm_default_args["tensorboard_dir"] = self.tensorboard_dir
        if self.other_megatron_args is not None:
            self.megatron_lm_default_args.update(self.other_megatron_args)

    def _check(self) -> None:
        degrees = ("tp_degree", "pp_degree", "context_parallel_size", "expert_model_parallel_size", "num_micro_batches")
        for name in degrees:
            if getattr(self, name) < 1:
                raise ConfigurationError(
                    f"{name}={getattr(self, name)} was requested, but it is 1 at least. Leave it out for 1."
                )
        if self.sequence_parallelism and self.tp_degree == 1:
            raise ConfigurationError(
                "sequence_parallelism=True was requested with tp_degree=1, but sequences are cut among the processes that split a "
                "layer. Pass tp_degree=2 or more, or leave it out."
            )

    def set_network_size_args(self, model: Any, batch_data: Any = None) -> None:
        """Take layers, widths and the length of sequences of a transformers model; `ConfigurationError` for an unknown kind."""
        parse_config(self, model, batch_data)

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Compute in this type."""
        if mixed_precision == "bf16":
            self.DDP_impl = "local"
            self.megatron_lm_default_args["DDP_impl"] = self.DDP_impl
        if mixed_precision in {"bf16", "fp16"}:
            self.megatron_lm_default_args[mixed_precision] = True

    def set_training_args(self, micro_batch_size: int, dp_degree: int) -> None:
        """Take so many samples in each part of a batch, on so many copies."""
        self.data_parallel_size = dp_degree
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = dp_degree * micro_batch_size * self.num_micro_batches
        for name in ("data_parallel_size", "micro_batch_size", "global_batch_size"):
            self.megatron_lm_default_args[name] = getattr(self, name)

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
        if self.train_iters is None:
            self.train_iters = scheduler.total_num_steps // copies
            if self.train_samples is not None:
                self.train_samples = None
                warn_user(
                    "Ignoring `train_samples` as `train_iters` based on scheduler is being used for training. Pass one of them."
                )
        if self.lr_warmup_iters is None:
            self.lr_warmup_iters = scheduler.warmup_num_steps // copies
            if self.lr_warmup_samples is not None:
                warn_user(
                    "Ignoring `lr_warmup_samples` as `lr_warmup_iters` based on scheduler is being used for training. Pass one of them."
                )
            self.lr_warmup_samples = 0
        for name in _OF_SCHEDULES:
            self.megatron_lm_default_args[name] = getattr(self, name)

    def set_tensorboard_logging_options(self) -> None:
        """Log whatever can be logged; an `Accelerator`'s trackers do, so that there is nothing to set here."""
