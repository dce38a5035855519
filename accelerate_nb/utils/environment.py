"""The import path `accelerate.utils.environment`: variables, and what the machine has, under Hugging Face's module name."""

from accelerate_nb.runtime.compat.env_vars import (
    CPUInformation as CPUInformation,
    are_libraries_initialized as are_libraries_initialized,
    check_cuda_fp8_capability as check_cuda_fp8_capability,
    check_cuda_p2p_ib_support as check_cuda_p2p_ib_support,
    clear_environment as clear_environment,
    convert_dict_to_env_variables as convert_dict_to_env_variables,
    get_cpu_distributed_information as get_cpu_distributed_information,
    get_driver_version as get_driver_version,
    get_gpu_info as get_gpu_info,
    get_int_from_env as get_int_from_env,
    override_numa_affinity as override_numa_affinity,
    parse_choice_from_env as parse_choice_from_env,
    parse_flag_from_env as parse_flag_from_env,
    patch_environment as patch_environment,
    purge_accelerate_environment as purge_accelerate_environment,
    set_numa_affinity as set_numa_affinity,
    str_to_bool as str_to_bool,
)
from accelerate_nb.runtime.compat.packages import get_current_device_type as get_current_device_type
