"""The import path `accelerate.utils`: what its modules offer, and what Hugging Face offers under this name alone."""

from accelerate_nb.runtime.compat.basic_config import write_basic_config as write_basic_config
from accelerate_nb.runtime.parallelism_config import ParallelismConfig as ParallelismConfig
from accelerate_nb.utils import torch_xla as torch_xla
from accelerate_nb.utils.ao import *
from accelerate_nb.utils.bnb import *
from accelerate_nb.utils.constants import *
from accelerate_nb.utils.dataclasses import *
from accelerate_nb.utils.deepspeed import *
from accelerate_nb.utils.environment import *
from accelerate_nb.utils.fsdp_utils import *
from accelerate_nb.utils.imports import *
from accelerate_nb.utils.launch import PrepareForLaunch as PrepareForLaunch
from accelerate_nb.utils.megatron_lm import (
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
    gather_across_data_parallel_groups as gather_across_data_parallel_groups,
    initialize as megatron_lm_initialize,
    megatron_from_transformers as megatron_from_transformers,
    megatron_to_transformers as megatron_to_transformers,
    prepare_data_loader as megatron_lm_prepare_data_loader,
    prepare_model_optimizer_scheduler as megatron_lm_prepare_model_optimizer_scheduler,
    prepare_optimizer as megatron_lm_prepare_optimizer,
    prepare_scheduler as megatron_lm_prepare_scheduler,
)
from accelerate_nb.utils.memory import *
from accelerate_nb.utils.modeling import *
from accelerate_nb.utils.offload import *
from accelerate_nb.utils.operations import *
from accelerate_nb.utils.other import *
from accelerate_nb.utils.random import *
from accelerate_nb.utils.tqdm import *
from accelerate_nb.utils.transformer_engine import *
from accelerate_nb.utils.versions import *
