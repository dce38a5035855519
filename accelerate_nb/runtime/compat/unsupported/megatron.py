"""Megatron-LM: its settings, and its functions' names."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from accelerate_nb.runtime.compat.unsupported.base import Unsupported

_unsupported = Unsupported("Megatron-LM", "Train with DDP: leave it out.")


@dataclass
@_unsupported
class MegatronLMPlugin:
    """The configuration of Megatron-LM; `None` leaves a value to Megatron-LM, or to the `MEGATRON_LM_*` variables."""

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

    def set_network_size_args(self, model: Any, batch_data: Any = None) -> Any: ...
    def set_mixed_precision(self, mixed_precision: str) -> Any: ...
    def set_training_args(self, micro_batch_size: int, dp_degree: int) -> Any: ...
    def set_optimizer_type(self, optimizer: Any) -> Any: ...
    def set_scheduler_args(self, scheduler: Any) -> Any: ...
    def set_tensorboard_logging_options(self) -> Any: ...


def add_model_config_to_megatron_parser(model_type: str) -> Any: ...
def parse_bert_config(megatron_lm_plugin: MegatronLMPlugin, model: Any, batch_data: Any) -> Any: ...
def parse_gpt2_config(megatron_lm_plugin: MegatronLMPlugin, model: Any, batch_data: Any) -> Any: ...
def parse_t5_config(megatron_lm_plugin: MegatronLMPlugin, model: Any, batch_data: Any) -> Any: ...
def parse_llama_config(megatron_lm_plugin: MegatronLMPlugin, model: Any, batch_data: Any) -> Any: ...
def parse_glm4_moe_config(megatron_lm_plugin: MegatronLMPlugin, model: Any, batch_data: Any) -> Any: ...
def initialize(
    accelerator: Any, extra_args_provider: Callable[..., Any] | None = None, args_defaults: dict[str, Any] | None = None
) -> Any: ...
def finish_mpu_init() -> Any: ...
def model_provider_func(
    pre_process: bool = True, post_process: bool = True, add_encoder: bool = True, add_decoder: bool = True
) -> Any: ...
def prepare_data_loader(accelerator: Any, dataloader: Any) -> Any: ...
def prepare_model_optimizer_scheduler(accelerator: Any) -> Any: ...
def prepare_optimizer(accelerator: Any, model: Any) -> Any: ...
def prepare_scheduler(accelerator: Any, optimizer: Any, scheduler: Any) -> Any: ...
def avg_losses_across_data_parallel_group(losses: list[Tensor]) -> Any: ...
def gather_across_data_parallel_groups(tensor: Any) -> Any: ...


class AbstractTrainStep:
    """Megatron-LM's step on a batch."""

    def __init__(self, name: str) -> None: ...
    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Any: ...
    def get_forward_step_func(self) -> Any: ...
    def get_loss_func(self, accelerator: Any) -> Any: ...


class BertTrainStep(AbstractTrainStep):
    """Megatron-LM's step on a batch for BERT."""

    def __init__(self, accelerator: Any, args: Any) -> None: ...
    def get_loss_func(self, accelerator: Any, pretraining_flag: bool = False, num_labels: int = 0) -> Any: ...
    def get_forward_step_func(self, pretraining_flag: bool = False, bert_binary_head: bool = False) -> Any: ...


class GPTTrainStep(AbstractTrainStep):
    """Megatron-LM's step on a batch for GPT."""

    def __init__(self, accelerator: Any, args: Any) -> None: ...


class T5TrainStep(AbstractTrainStep):
    """Megatron-LM's step on a batch for T5."""

    def __init__(self, accelerator: Any, args: Any) -> None: ...
    @staticmethod
    @_unsupported
    def attn_mask_postprocess(attention_mask: Tensor) -> Any: ...
    @staticmethod
    @_unsupported
    def get_decoder_mask(seq_length: int, device: Any) -> Any: ...
    @staticmethod
    @_unsupported
    def get_enc_dec_mask(attention_mask: Tensor, dec_seq_length: int, device: Any) -> Any: ...


class MegatronLMDummyDataLoader:
    """A placeholder of a loader that Megatron-LM makes."""

    def __init__(self, **dataset_kwargs: Any) -> None: ...
    def set_megatron_data_args(self) -> Any: ...
    def get_train_valid_test_datasets_provider(self, accelerator: Any) -> Any: ...
    def build_train_valid_test_data_iterators(self, accelerator: Any) -> Any: ...


class MegatronLMDummyScheduler:
    """A placeholder of a schedule that Megatron-LM makes."""

    def __init__(
        self, optimizer: Any, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: Any
    ) -> None: ...


class MegatronLMOptimizerWrapper:
    """An optimizer that Megatron-LM steps."""

    def __init__(self, optimizer: Any) -> None: ...
    @property
    @_unsupported
    def step_was_skipped(self) -> Any: ...
    def step(self) -> Any: ...
    def zero_grad(self, set_to_none: bool | None = None) -> Any: ...


class MegatronLMSchedulerWrapper:
    """A schedule that Megatron-LM moves."""

    def __init__(self, scheduler: Any, optimizers: Any) -> None: ...
    def step(self, *args: Any, **kwargs: Any) -> Any: ...


class MegatronEngine:
    """Model, optimizer and schedule of Megatron-LM as one module."""

    def __init__(self, accelerator: Any, model: Any, optimizer: Any, scheduler: Any) -> None: ...
    def train(self) -> Any: ...
    def eval(self) -> Any: ...
    def forward(self, **batch_data: Any) -> Any: ...
    def train_step(self, **batch_data: Any) -> Any: ...
    def eval_step(self, **batch_data: Any) -> Any: ...
    def get_batch_data_iterator(self, batch_data: dict[str, Any]) -> Any: ...
    def get_module_config(self) -> Any: ...
    def log_eval_results(self) -> Any: ...
    def save_checkpoint(self, output_dir: str | os.PathLike[str]) -> Any: ...
    def load_checkpoint(self, input_dir: str | os.PathLike[str]) -> Any: ...


_unsupported.all_of(globals())

MODEL_CONFIGS_TO_MEGATRON_PARSERS = {
    "megatron-bert": parse_bert_config,
    "gpt2": parse_gpt2_config,
    "t5": parse_t5_config,
    "llama": parse_llama_config,
    "glm4_moe": parse_glm4_moe_config,
}
