"""The import path `accelerate.utils.dataclasses`: the runtime's settings under Hugging Face's module name."""

from accelerate_nb.big_models.bnb import BnbQuantizationConfig as BnbQuantizationConfig
from accelerate_nb.config.options.megatron import (
    MODEL_CONFIGS_TO_MEGATRON_PARSERS as MODEL_CONFIGS_TO_MEGATRON_PARSERS,
    MegatronLMPlugin as MegatronLMPlugin,
    parse_gpt2_config as parse_gpt2_config,
    parse_llama_config as parse_llama_config,
)
from accelerate_nb.runtime.compat.constants import (
    BETA_CP_AVAILABLE_PYTORCH_VERSION as BETA_CP_AVAILABLE_PYTORCH_VERSION,
    BETA_TP_AVAILABLE_PYTORCH_VERSION as BETA_TP_AVAILABLE_PYTORCH_VERSION,
    BETA_TP_AVAILABLE_TRANSFORMERS_VERSION as BETA_TP_AVAILABLE_TRANSFORMERS_VERSION,
    FSDP2_PYTORCH_VERSION as FSDP2_PYTORCH_VERSION,
    FSDP_AUTO_WRAP_POLICY as FSDP_AUTO_WRAP_POLICY,
    FSDP_BACKWARD_PREFETCH as FSDP_BACKWARD_PREFETCH,
    FSDP_SHARDING_STRATEGY as FSDP_SHARDING_STRATEGY,
    MITA_PROFILING_AVAILABLE_PYTORCH_VERSION as MITA_PROFILING_AVAILABLE_PYTORCH_VERSION,
    XPU_PROFILING_AVAILABLE_PYTORCH_VERSION as XPU_PROFILING_AVAILABLE_PYTORCH_VERSION,
)
from accelerate_nb.runtime.compat.dataclasses import *
from accelerate_nb.runtime.compat.dataclasses import Kind as BaseEnum, KnowsItsValues as EnumWithContains
from accelerate_nb.runtime.compat.unsupported import (
    add_model_config_to_megatron_parser as add_model_config_to_megatron_parser,
    parse_bert_config as parse_bert_config,
    parse_glm4_moe_config as parse_glm4_moe_config,
    parse_t5_config as parse_t5_config,
)
from accelerate_nb.runtime.observability.profiling import ProfileKwargs as ProfileKwargs
from accelerate_nb.runtime.operations.nested import TensorInformation as TensorInformation
from accelerate_nb.runtime.parallelism_config import *
from accelerate_nb.runtime.precision.fp8 import (
    AORecipeKwargs as AORecipeKwargs,
    FP8RecipeKwargs as FP8RecipeKwargs,
    MSAMPRecipeKwargs as MSAMPRecipeKwargs,
    TERecipeKwargs as TERecipeKwargs,
)
from accelerate_nb.runtime.strategies.deepspeed.plugin import DeepSpeedPlugin as DeepSpeedPlugin
from accelerate_nb.runtime.strategies.fsdp.plugin import (
    FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
)
from accelerate_nb.runtime.training.compile import TorchDynamoPlugin as TorchDynamoPlugin
from accelerate_nb.runtime.training.unwrap import get_module_class_from_name as get_module_class_from_name
