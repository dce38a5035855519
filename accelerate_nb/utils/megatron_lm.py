"""The import path `accelerate.utils.megatron_lm`: Megatron-LM's classes under Hugging Face's module name."""

from accelerate_nb.runtime.compat.unsupported import BertTrainStep as BertTrainStep, T5TrainStep as T5TrainStep
from accelerate_nb.runtime.strategies.megatron.conversion import (
    megatron_from_transformers as megatron_from_transformers,
    megatron_to_transformers as megatron_to_transformers,
)
from accelerate_nb.runtime.strategies.megatron.engine import MegatronEngine as MegatronEngine
from accelerate_nb.runtime.strategies.megatron.preparation import (
    MegatronLMDummyDataLoader as MegatronLMDummyDataLoader,
    MegatronLMDummyScheduler as MegatronLMDummyScheduler,
    MegatronLMOptimizerWrapper as MegatronLMOptimizerWrapper,
    MegatronLMSchedulerWrapper as MegatronLMSchedulerWrapper,
    prepare_data_loader as prepare_data_loader,
    prepare_model_optimizer_scheduler as prepare_model_optimizer_scheduler,
    prepare_optimizer as prepare_optimizer,
    prepare_scheduler as prepare_scheduler,
)
from accelerate_nb.runtime.strategies.megatron.train_steps import (
    AbstractTrainStep as AbstractTrainStep,
    GPTTrainStep as GPTTrainStep,
    avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group,
    finish_mpu_init as finish_mpu_init,
    gather_across_data_parallel_groups as gather_across_data_parallel_groups,
    get_args as get_args,
    initialize as initialize,
    model_provider_func as model_provider_func,
)
