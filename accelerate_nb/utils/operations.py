"""The import path `accelerate.utils.operations`: work on nested tensors under Hugging Face's module name."""

from accelerate_nb.errors import OperationError as DistributedOperationException
from accelerate_nb.runtime.compat.constants import (
    TORCH_DISTRIBUTED_OPERATION_TYPES as TORCH_DISTRIBUTED_OPERATION_TYPES,
)
from accelerate_nb.runtime.operations.collective import *
from accelerate_nb.runtime.operations.nested import *
