"""The settings of a `MegatronLMPlugin` that would change nothing about a training."""

from __future__ import annotations

from dataclasses import fields

from accelerate_nb.config.options import megatron
from accelerate_nb.errors import NotYetError
from accelerate_nb.runtime.strategies.megatron.plugin import MegatronLMPlugin

# What Megatron-LM's own schedules, data sets, steps and models are made with, which Accelerate's engine reads.
_OF_ENGINE = frozenset(
    {
        *("num_layers_per_virtual_pipeline_stage", "is_train_batch_min", "min_lr", "consumed_samples"),
        *("train_iters", "train_samples", "weight_decay_incr_style", "start_weight_decay", "end_weight_decay"),
        *("lr_decay_style", "lr_decay_iters", "lr_decay_samples", "lr_warmup_iters", "lr_warmup_samples"),
        *("lr_warmup_fraction", "no_wd_decay_cond", "scale_lr_cond", "lr_mult", "megatron_dataset_flag", "seq_length"),
        *("encoder_seq_length", "decoder_seq_length", "eval_iters", "eval_interval", "return_logits"),
        *("custom_train_step_class", "custom_train_step_kwargs", "custom_model_provider_function"),
        *("custom_prepare_model_function", "custom_megatron_datasets_provider_function", "custom_get_batch_function"),
        *("custom_loss_function", "other_megatron_args"),
    }
)
# Of Megatron-LM's own loop and logs, which nothing here has.
_OF_ITS_LOOP = frozenset({"pipeline_model_parallel_split_rank", "tensorboard_dir", "set_all_logging_options"})


def refuse_unused(plugin: MegatronLMPlugin) -> None:
    """Raise `NotYetError` for a setting that a person has given and that a model which is built in a cell does not read."""
    values = vars(plugin)
    found = _given(plugin, _OF_ENGINE | _OF_ITS_LOOP) + megatron.of_engine(values) + megatron.not_offered(values)
    if found:
        raise NotYetError(
            f"MegatronLMPlugin({', '.join(f'{name}=...' for name in found)}) was requested, which is not offered here yet beside a model that "
            "is built in a cell. Write it in the model's TransformerConfig where that has it, and leave it out here."
        )


def refuse_unused_by_engine(plugin: MegatronLMPlugin) -> None:
    """Raise `NotYetError` for a setting that a person has given and that the engine does not read."""
    if found := _given(plugin, _OF_ITS_LOOP) + megatron.not_offered(vars(plugin)):
        raise NotYetError(
            f"MegatronLMPlugin({', '.join(f'{name}=...' for name in found)}) was requested, which is not offered here yet. Leave it out."
        )


def _given(plugin: MegatronLMPlugin, names: frozenset[str]) -> list[str]:
    """The settings of these names that have another value than by default."""
    return [
        field.name for field in fields(plugin) if field.name in names and getattr(plugin, field.name) != field.default
    ]
