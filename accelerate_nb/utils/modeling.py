"""The import path `accelerate.utils.modeling`: sizes, device maps and weights, under Hugging Face's module name."""

from accelerate_nb.big_models.device_map import (
    check_device_map as check_device_map,
    check_tied_parameters_in_config as check_tied_parameters_in_config,
    check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
    clean_device_map as clean_device_map,
    fallback_allocate as fallback_allocate,
    find_tied_parameters as find_tied_parameters,
    get_module_size_with_ties as get_module_size_with_ties,
    infer_auto_device_map as infer_auto_device_map,
    retie_parameters as retie_parameters,
)
from accelerate_nb.big_models.load_checkpoint import (
    load_checkpoint_in_model as load_checkpoint_in_model,
    load_offloaded_weights as load_offloaded_weights,
    load_state_dict as load_state_dict,
)
from accelerate_nb.big_models.memory import (
    calculate_maximum_sizes as calculate_maximum_sizes,
    compute_module_sizes as compute_module_sizes,
    compute_module_total_buffer_size as compute_module_total_buffer_size,
    dtype_byte_size as dtype_byte_size,
    get_balanced_memory as get_balanced_memory,
    get_max_layer_size as get_max_layer_size,
    get_max_memory as get_max_memory,
    get_module_leaves as get_module_leaves,
)
from accelerate_nb.big_models.offload_hooks import (
    align_module_device as align_module_device,
    get_state_dict_from_offload as get_state_dict_from_offload,
    get_state_dict_offloaded_model as get_state_dict_offloaded_model,
    has_offloaded_params as has_offloaded_params,
)
from accelerate_nb.big_models.tensors import (
    check_device_same as check_device_same,
    get_non_persistent_buffers as get_non_persistent_buffers,
    id_tensor_storage as id_tensor_storage,
    named_module_tensors as named_module_tensors,
    set_module_tensor_to_device as set_module_tensor_to_device,
)
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
