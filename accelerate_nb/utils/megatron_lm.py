"""The import path `accelerate.utils.megatron_lm`: Megatron-LM's classes under Hugging Face's module name."""

from accelerate_nb.runtime.compat.unsupported import BertTrainStep as BertTrainStep, T5TrainStep as T5TrainStep
from accelerate_nb.runtime.strategies.megatron.conversion import (
    megatron_from_transformers as megatron_from_transformers,
    megatron_to_transformers as megatron_to_transformers,
    model_provider_func as model_provider_func,
    prepare_model_optimizer_scheduler as prepare_model_optimizer_scheduler,
)
from accelerate_nb.runtime.strategies.megatron.engine import *
from accelerate_nb.runtime.strategies.megatron.training import *
