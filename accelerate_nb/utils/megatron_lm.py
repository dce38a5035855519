"""The import path `accelerate.utils.megatron_lm`: Megatron-LM's classes under Hugging Face's module name."""

from accelerate_nb.runtime.compat.unsupported.megatron import (
    AbstractTrainStep as AbstractTrainStep,
    BertTrainStep as BertTrainStep,
    GPTTrainStep as GPTTrainStep,
    MegatronEngine as MegatronEngine,
    MegatronLMDummyDataLoader as MegatronLMDummyDataLoader,
    MegatronLMDummyScheduler as MegatronLMDummyScheduler,
    MegatronLMOptimizerWrapper as MegatronLMOptimizerWrapper,
    MegatronLMSchedulerWrapper as MegatronLMSchedulerWrapper,
    T5TrainStep as T5TrainStep,
    avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group,
    finish_mpu_init as finish_mpu_init,
    gather_across_data_parallel_groups as gather_across_data_parallel_groups,
    initialize as initialize,
    model_provider_func as model_provider_func,
    prepare_data_loader as prepare_data_loader,
    prepare_model_optimizer_scheduler as prepare_model_optimizer_scheduler,
    prepare_optimizer as prepare_optimizer,
    prepare_scheduler as prepare_scheduler,
)
