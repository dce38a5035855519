"""The import path `accelerate.utils.random`: seeds under Hugging Face's module name."""

from accelerate_nb.runtime.compat.constants import CUDA_DISTRIBUTED_TYPES as CUDA_DISTRIBUTED_TYPES
from accelerate_nb.runtime.training.seed import (
    set_seed as set_seed,
    synchronize_rng_state as synchronize_rng_state,
    synchronize_rng_states as synchronize_rng_states,
)
