"""The import path `accelerate.utils.deepspeed`: DeepSpeed's classes under Hugging Face's module name."""

from accelerate_nb.runtime.strategies.deepspeed.plugin import (
    HfDeepSpeedConfig as HfDeepSpeedConfig,
    get_active_deepspeed_plugin as get_active_deepspeed_plugin,
)
from accelerate_nb.runtime.strategies.deepspeed.preparation import *
