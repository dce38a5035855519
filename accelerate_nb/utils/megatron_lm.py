"""The import path `accelerate.utils.megatron_lm`: Megatron-LM's classes under Hugging Face's module name."""

from accelerate_nb.runtime.compat.unsupported import BertTrainStep as BertTrainStep, T5TrainStep as T5TrainStep
from accelerate_nb.runtime.strategies.megatron.conversion import (
    megatron_from_transformers as megatron_from_transformers,
    megatron_to_transformers as megatron_to_transformers,
    model_provider_func as model_provider_func,
    prepare_model_optimizer_scheduler as prepare_model_optimizer_scheduler,
)
from accelerate_nb.runtime.strategies.megatron.engine import (
    AbstractTrainStep as AbstractTrainStep,
    GPTTrainStep as GPTTrainStep,
    MegatronEngine as MegatronEngine,
    avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group,
    gather_across_data_parallel_groups as gather_across_data_parallel_groups,
)
from accelerate_nb.runtime.strategies.megatron.training import (
    MegatronLMDummyDataLoader as MegatronLMDummyDataLoader,
    MegatronLMDummyScheduler as MegatronLMDummyScheduler,
    MegatronLMOptimizerWrapper as MegatronLMOptimizerWrapper,
    MegatronLMSchedulerWrapper as MegatronLMSchedulerWrapper,
    finish_mpu_init as finish_mpu_init,
    get_args as get_args,
    initialize as initialize,
    prepare_data_loader as prepare_data_loader,
    prepare_optimizer as prepare_optimizer,
    prepare_scheduler as prepare_scheduler,
)
