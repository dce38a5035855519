"""The import path `accelerate.utils.memory`: functions that free memory, under Hugging Face's module name."""

from accelerate_nb.runtime.training.memory import (
    clear_device_cache as clear_device_cache,
    find_executable_batch_size as find_executable_batch_size,
    release_memory as release_memory,
    should_reduce_batch_size as should_reduce_batch_size,
)
