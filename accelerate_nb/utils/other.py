"""The import path `accelerate.utils.other`: what Hugging Face keeps in this module."""

from accelerate_nb.runtime.compat.constants import FSDP_PYTORCH_VERSION as FSDP_PYTORCH_VERSION
from accelerate_nb.runtime.compat.formatting import *
from accelerate_nb.runtime.compat.save import *
from accelerate_nb.runtime.training.compile import *
from accelerate_nb.runtime.training.compile import (
    compile_regions_in_place as compile_regions_deepspeed,
    compile_regions_in_place as compile_regions_fsdp2,
)
from accelerate_nb.runtime.training.unwrap import (
    extract_model_from_parallel as extract_model_from_parallel,
    get_model_tp_size as get_model_tp_size,
    get_module_children_bottom_up as get_module_children_bottom_up,
    model_has_dtensor as model_has_dtensor,
)
