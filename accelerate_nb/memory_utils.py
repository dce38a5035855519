"""The import path `accelerate.memory_utils`: an older name of `accelerate.utils.memory`."""

from accelerate_nb.runtime.training.memory import find_executable_batch_size as find_executable_batch_size
