"""The import path `accelerate.utils.modeling`: sizes, device maps and weights, under Hugging Face's module name."""

from accelerate_nb.big_models.device_map import *
from accelerate_nb.big_models.load_checkpoint import (
    load_checkpoint_in_model as load_checkpoint_in_model,
    load_offloaded_weights as load_offloaded_weights,
    load_state_dict as load_state_dict,
)
from accelerate_nb.big_models.memory import *
from accelerate_nb.big_models.offload_hooks import (
    align_module_device as align_module_device,
    get_state_dict_from_offload as get_state_dict_from_offload,
    get_state_dict_offloaded_model as get_state_dict_offloaded_model,
    has_offloaded_params as has_offloaded_params,
)
from accelerate_nb.big_models.tensors import *
from accelerate_nb.runtime.checkpoints.file_names import (
    SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME as WEIGHTS_NAME,
)
from accelerate_nb.runtime.checkpoints.writer import parse_size as convert_file_size_to_int
from accelerate_nb.runtime.precision.registry import (
    get_grad_scaler as get_grad_scaler,
    get_mixed_precision_context_manager as get_mixed_precision_context_manager,
)
from accelerate_nb.runtime.training.unwrap import is_peft_model as is_peft_model
