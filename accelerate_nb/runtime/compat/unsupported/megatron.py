"""Megatron-LM: its settings, and its functions' names."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from accelerate_nb.runtime.later.base import Later

_later = Later("Megatron-LM", "Train with DDP: leave it out.")


@dataclass
class MegatronLMPlugin:
    """How Megatron-LM is to train; `None` leaves it to Megatron-LM, or to the `MEGATRON_LM_*` variables."""

    tp_degree: int | None = None
    pp_degree: int | None = None
    use_custom_fsdp: bool | None = None
    overlap_cpu_optimizer_d2h_h2d: bool | None = None
    no_load_optim: bool | None = None
    eod_mask_loss: bool | None = None
    no_save_optim: bool | None = None
    optimizer_cpu_offload: bool | None = None
    use_precision_aware_optimizer: bool | None = None
    decoder_last_pipeline_num_layers: int | None = None
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    attention_backend: Any = None
    expert_model_parallel_size: int | None = None
    context_parallel_size: int | None = None
    attention_dropout: float | None = None
    hidden_dropout: float | None = None
    attention_softmax_in_fp32: bool | None = None
    expert_tensor_parallel_size: int | None = None
    calculate_per_token_loss: bool | None = None
    use_rotary_position_embeddings: bool | None = None
    num_micro_batches: int | None = None
    gradient_clipping: float | None = None
    sequence_parallelism: bool | None = None
    recompute_activations: bool | None = None
    use_distributed_optimizer: bool | None = None
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
    min_lr: float = 0.0
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

    @_later
    def set_network_size_args(self, model: Any, batch_data: Any = None) -> Any:
        """Tell Megatron-LM the sizes of a model of transformers."""

    @_later
    def set_mixed_precision(self, mixed_precision: str) -> Any:
        """Choose the numbers to compute with."""

    @_later
    def set_training_args(self, micro_batch_size: int, dp_degree: int) -> Any:
        """Tell Megatron-LM the sizes of batches."""

    @_later
    def set_optimizer_type(self, optimizer: Any) -> Any:
        """Tell Megatron-LM which of its optimizers is as torch's."""

    @_later
    def set_scheduler_args(self, scheduler: Any) -> Any:
        """Tell Megatron-LM its schedule."""

    @_later
    def set_tensorboard_logging_options(self) -> Any:
        """Have Megatron-LM write for TensorBoard."""


@_later
def add_model_config_to_megatron_parser(model_type: str) -> Any:
    """A decorator: the function reads the sizes of a type of models."""


@_later
def parse_bert_config(megatron_lm_plugin: MegatronLMPlugin, model: Any, batch_data: Any) -> Any:
    """The sizes of a BERT as Megatron-LM wants them."""


@_later
def parse_gpt2_config(megatron_lm_plugin: MegatronLMPlugin, model: Any, batch_data: Any) -> Any:
    """The sizes of a GPT-2 as Megatron-LM wants them."""


@_later
def parse_t5_config(megatron_lm_plugin: MegatronLMPlugin, model: Any, batch_data: Any) -> Any:
    """The sizes of a T5 as Megatron-LM wants them."""


@_later
def parse_llama_config(megatron_lm_plugin: MegatronLMPlugin, model: Any, batch_data: Any) -> Any:
    """The sizes of a Llama as Megatron-LM wants them."""


@_later
def parse_glm4_moe_config(megatron_lm_plugin: MegatronLMPlugin, model: Any, batch_data: Any) -> Any:
    """The sizes of a GLM-4 with experts as Megatron-LM wants them."""


MODEL_CONFIGS_TO_MEGATRON_PARSERS = {
    "megatron-bert": parse_bert_config,
    "gpt2": parse_gpt2_config,
    "t5": parse_t5_config,
    "llama": parse_llama_config,
    "glm4_moe": parse_glm4_moe_config,
}


@_later
def initialize(
    accelerator: Any,
    extra_args_provider: Callable[..., Any] | None = None,
    args_defaults: dict[str, Any] | None = None,
) -> Any:
    """Set Megatron-LM up."""


@_later
def finish_mpu_init() -> Any:
    """Make Megatron-LM's process groups."""


@_later
def model_provider_func(
    pre_process: bool = True, post_process: bool = True, add_encoder: bool = True, add_decoder: bool = True
) -> Any:
    """The part of the model that this process has."""


@_later
def prepare_data_loader(accelerator: Any, dataloader: Any) -> Any:
    """The loader, as Megatron-LM reads it."""


@_later
def prepare_model_optimizer_scheduler(accelerator: Any) -> Any:
    """Model, optimizer and schedule, as Megatron-LM makes them."""


@_later
def prepare_optimizer(accelerator: Any, model: Any) -> Any:
    """The optimizer, as Megatron-LM makes it."""


@_later
def prepare_scheduler(accelerator: Any, optimizer: Any, scheduler: Any) -> Any:
    """The schedule, as Megatron-LM makes it."""


@_later
def avg_losses_across_data_parallel_group(losses: list[Tensor]) -> Any:
    """The mean of the losses of all processes that read different batches."""


@_later
def gather_across_data_parallel_groups(tensor: Any) -> Any:
    """The tensors of all processes that read different batches."""


class AbstractTrainStep:
    """What Megatron-LM does with a batch."""

    @_later
    def __init__(self, name: str) -> None: ...

    @_later
    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Any:
        """What makes a batch."""

    @_later
    def get_forward_step_func(self) -> Any:
        """What computes a batch's output."""

    @_later
    def get_loss_func(self, accelerator: Any) -> Any:
        """What computes the loss."""


class BertTrainStep(AbstractTrainStep):
    """What Megatron-LM does with a batch for BERT."""

    @_later
    def __init__(self, accelerator: Any, args: Any) -> None: ...

    @_later
    def get_loss_func(self, accelerator: Any, pretraining_flag: bool = False, num_labels: int = 0) -> Any:
        """What computes the loss."""

    @_later
    def get_forward_step_func(self, pretraining_flag: bool = False, bert_binary_head: bool = False) -> Any:
        """What computes a batch's output."""


class GPTTrainStep(AbstractTrainStep):
    """What Megatron-LM does with a batch for GPT."""

    @_later
    def __init__(self, accelerator: Any, args: Any) -> None: ...


class T5TrainStep(AbstractTrainStep):
    """What Megatron-LM does with a batch for T5."""

    @_later
    def __init__(self, accelerator: Any, args: Any) -> None: ...

    @staticmethod
    @_later
    def attn_mask_postprocess(attention_mask: Tensor) -> Any:
        """The mask as Megatron-LM wants it."""

    @staticmethod
    @_later
    def get_decoder_mask(seq_length: int, device: Any) -> Any:
        """The mask of a decoder."""

    @staticmethod
    @_later
    def get_enc_dec_mask(attention_mask: Tensor, dec_seq_length: int, device: Any) -> Any:
        """The mask between encoder and decoder."""


class MegatronLMDummyDataLoader:
    """What stands for a loader that Megatron-LM makes."""

    @_later
    def __init__(self, **dataset_kwargs: Any) -> None: ...

    @_later
    def set_megatron_data_args(self) -> Any:
        """Tell Megatron-LM its data."""

    @_later
    def get_train_valid_test_datasets_provider(self, accelerator: Any) -> Any:
        """What makes the data sets."""

    @_later
    def build_train_valid_test_data_iterators(self, accelerator: Any) -> Any:
        """The iterators over the data sets."""


class MegatronLMDummyScheduler:
    """What stands for a schedule that Megatron-LM makes."""

    @_later
    def __init__(
        self, optimizer: Any, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: Any
    ) -> None: ...


class MegatronLMOptimizerWrapper:
    """An optimizer that Megatron-LM steps."""

    @_later
    def __init__(self, optimizer: Any) -> None: ...

    @property
    @_later
    def step_was_skipped(self) -> Any:
        """Whether the last step was left out because a gradient overflowed."""

    @_later
    def step(self) -> Any:
        """Leave the step to Megatron-LM."""

    @_later
    def zero_grad(self, set_to_none: bool | None = None) -> Any:
        """Leave the gradients to Megatron-LM."""


class MegatronLMSchedulerWrapper:
    """A schedule that Megatron-LM moves."""

    @_later
    def __init__(self, scheduler: Any, optimizers: Any) -> None: ...

    @_later
    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Leave the move to Megatron-LM."""


class MegatronEngine:
    """Model, optimizer and schedule of Megatron-LM as one module."""

    @_later
    def __init__(self, accelerator: Any, model: Any, optimizer: Any, scheduler: Any) -> None: ...

    @_later
    def train(self) -> Any:
        """Switch to training."""

    @_later
    def eval(self) -> Any:
        """Switch to evaluation."""

    @_later
    def forward(self, **batch_data: Any) -> Any:
        """The loss of a batch, after a step in training."""

    @_later
    def train_step(self, **batch_data: Any) -> Any:
        """A step of training."""

    @_later
    def eval_step(self, **batch_data: Any) -> Any:
        """A step of evaluation."""

    @_later
    def get_batch_data_iterator(self, batch_data: dict[str, Any]) -> Any:
        """A batch, cut into micro-batches."""

    @_later
    def get_module_config(self) -> Any:
        """Megatron-LM's configuration of the model."""

    @_later
    def log_eval_results(self) -> Any:
        """Write what the evaluation found."""

    @_later
    def save_checkpoint(self, output_dir: str | os.PathLike[str]) -> Any:
        """Write a checkpoint of Megatron-LM's own kind."""

    @_later
    def load_checkpoint(self, input_dir: str | os.PathLike[str]) -> Any:
        """Read a checkpoint of Megatron-LM's own kind."""
