"""The import path `accelerate.utils.fsdp_utils`: FSDP's functions under Hugging Face's module name."""

from accelerate_nb.runtime.checkpoints.file_names import (
    OPTIMIZER_NAME as OPTIMIZER_NAME,
    SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME,
    WEIGHTS_NAME as WEIGHTS_NAME,
)
from accelerate_nb.runtime.checkpoints.fsdp_states import (
    load_fsdp_model as load_fsdp_model,
    load_fsdp_optimizer as load_fsdp_optimizer,
    save_fsdp_model as save_fsdp_model,
    save_fsdp_optimizer as save_fsdp_optimizer,
)
from accelerate_nb.runtime.checkpoints.shards import merge_fsdp_weights as merge_fsdp_weights
from accelerate_nb.runtime.compat.constants import FSDP_MODEL_NAME as FSDP_MODEL_NAME
from accelerate_nb.runtime.compat.unsupported import ensure_weights_retied as ensure_weights_retied
from accelerate_nb.runtime.strategies.fsdp.plugin import (
    disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading,
)
from accelerate_nb.runtime.strategies.fsdp.strategy import *
