"""The import path `accelerate.utils.deepspeed`: DeepSpeed's classes under Hugging Face's module name."""

from accelerate_nb.runtime.strategies.deepspeed.config.hf_config import HfDeepSpeedConfig as HfDeepSpeedConfig
from accelerate_nb.runtime.strategies.deepspeed.cpu_optimizers import (
    map_pytorch_optim_to_deepspeed as map_pytorch_optim_to_deepspeed,
)
from accelerate_nb.runtime.strategies.deepspeed.hf_functions import (
    get_active_deepspeed_plugin as get_active_deepspeed_plugin,
)
from accelerate_nb.runtime.strategies.deepspeed.placeholders import (
    DummyOptim as DummyOptim,
    DummyScheduler as DummyScheduler,
)
from accelerate_nb.runtime.strategies.deepspeed.wrappers import (
    DeepSpeedEngineWrapper as DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper,
)
