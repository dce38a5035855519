"""The door `accelerate.state`: the process's state under Hugging Face's module name."""

from accelerate_nb.runtime.accumulation import GradientState as GradientState
from accelerate_nb.runtime.kinds import DistributedType as DistributedType
from accelerate_nb.runtime.process import (
    AcceleratorState as AcceleratorState,
    PartialState as PartialState,
    is_initialized as is_initialized,
)
