"""The import path `accelerate.checkpointing`: the parts of a checkpoint under Hugging Face's module name."""

from accelerate_nb.runtime.checkpoints.checkpoint import (
    load_accelerator_state as load_accelerator_state,
    load_custom_state as load_custom_state,
    save_accelerator_state as save_accelerator_state,
    save_custom_state as save_custom_state,
)
from accelerate_nb.runtime.checkpoints.file_names import (
    MODEL_NAME as MODEL_NAME,
    OPTIMIZER_NAME as OPTIMIZER_NAME,
    RNG_STATE_NAME as RNG_STATE_NAME,
    SAFE_MODEL_NAME as SAFE_MODEL_NAME,
    SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME,
    SAMPLER_NAME as SAMPLER_NAME,
    SCALER_NAME as SCALER_NAME,
    SCHEDULER_NAME as SCHEDULER_NAME,
    WEIGHTS_NAME as WEIGHTS_NAME,
)
