"""The import path `accelerate.utils.other`: what Hugging Face keeps in this module."""

from accelerate_nb.runtime.compat.constants import FSDP_PYTORCH_VERSION as FSDP_PYTORCH_VERSION
from accelerate_nb.runtime.compat.formatting import (
    check_os_kernel as check_os_kernel,
    convert_bytes as convert_bytes,
    get_free_port as get_free_port,
    get_pretty_name as get_pretty_name,
    is_port_in_use as is_port_in_use,
    merge_dicts as merge_dicts,
    recursive_getattr as recursive_getattr,
)
from accelerate_nb.runtime.compat.save import (
    TORCH_SAFE_GLOBALS as TORCH_SAFE_GLOBALS,
    clean_state_dict_for_safetensors as clean_state_dict_for_safetensors,
    load as load,
    save as save,
    wait_for_everyone as wait_for_everyone,
)
from accelerate_nb.runtime.training.compile import (
    compile_regions as compile_regions,
    compile_regions_in_place as compile_regions_deepspeed,
    compile_regions_in_place as compile_regions_fsdp2,
    has_compiled_regions as has_compiled_regions,
    has_repeated_blocks as has_repeated_blocks,
    is_compiled_module as is_compiled_module,
    is_repeated_blocks as is_repeated_blocks,
)
from accelerate_nb.runtime.training.unwrap import (
    extract_model_from_parallel as extract_model_from_parallel,
    get_model_tp_size as get_model_tp_size,
    get_module_children_bottom_up as get_module_children_bottom_up,
    model_has_dtensor as model_has_dtensor,
)
