"""The import path `accelerate.state`: the process's state under Hugging Face's module name."""

from accelerate_nb.runtime.compat.dataclasses import DistributedType as DistributedType
from accelerate_nb.runtime.training.accumulation import GradientState as GradientState
from accelerate_nb.runtime.world.state import (
    AcceleratorState as AcceleratorState,
    PartialState as PartialState,
    is_initialized as is_initialized,
)
