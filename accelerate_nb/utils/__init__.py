"""The door `accelerate.utils`: what Hugging Face offers under this module name, as far as it is here."""

from accelerate_nb.runtime.checkpoints.names import (
    MODEL_NAME as MODEL_NAME,
    OPTIMIZER_NAME as OPTIMIZER_NAME,
    RNG_STATE_NAME as RNG_STATE_NAME,
    SAFE_MODEL_NAME as SAFE_MODEL_NAME,
    SAFE_WEIGHTS_INDEX_NAME as SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_PATTERN_NAME as SAFE_WEIGHTS_PATTERN_NAME,
    SAMPLER_NAME as SAMPLER_NAME,
    SCALER_NAME as SCALER_NAME,
    SCHEDULER_NAME as SCHEDULER_NAME,
    WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME as WEIGHTS_NAME,
    WEIGHTS_PATTERN_NAME as WEIGHTS_PATTERN_NAME,
)
from accelerate_nb.runtime.handlers import (
    AutocastKwargs as AutocastKwargs,
    DataLoaderConfiguration as DataLoaderConfiguration,
    DistributedDataParallelKwargs as DistributedDataParallelKwargs,
    GradientAccumulationPlugin as GradientAccumulationPlugin,
    GradScalerKwargs as GradScalerKwargs,
    InitProcessGroupKwargs as InitProcessGroupKwargs,
    KwargsHandler as KwargsHandler,
    ProjectConfiguration as ProjectConfiguration,
)
from accelerate_nb.runtime.kinds import (
    DDPCommunicationHookType as DDPCommunicationHookType,
    DistributedType as DistributedType,
    LoggerType as LoggerType,
    PrecisionType as PrecisionType,
    RNGType as RNGType,
)
from accelerate_nb.runtime.memory import (
    find_executable_batch_size as find_executable_batch_size,
    release_memory as release_memory,
)
from accelerate_nb.runtime.saving import save as save, wait_for_everyone as wait_for_everyone
from accelerate_nb.runtime.unwrapping import extract_model_from_parallel as extract_model_from_parallel
from accelerate_nb.utils.operations import (
    CannotPadNestedTensorWarning as CannotPadNestedTensorWarning,
    ConvertOutputsToFp32 as ConvertOutputsToFp32,
    TensorInformation as TensorInformation,
    broadcast as broadcast,
    broadcast_object_list as broadcast_object_list,
    concatenate as concatenate,
    convert_outputs_to_fp32 as convert_outputs_to_fp32,
    convert_to_fp32 as convert_to_fp32,
    copy_tensor_to_devices as copy_tensor_to_devices,
    find_batch_size as find_batch_size,
    find_device as find_device,
    gather as gather,
    gather_object as gather_object,
    get_data_structure as get_data_structure,
    get_shape as get_shape,
    honor_type as honor_type,
    ignorant_find_batch_size as ignorant_find_batch_size,
    initialize_tensors as initialize_tensors,
    is_namedtuple as is_namedtuple,
    is_tensor_information as is_tensor_information,
    is_torch_tensor as is_torch_tensor,
    is_torch_xpu_tensor as is_torch_xpu_tensor,
    listify as listify,
    pad_across_processes as pad_across_processes,
    pad_input_tensors as pad_input_tensors,
    recursively_apply as recursively_apply,
    reduce as reduce,
    send_to_device as send_to_device,
    slice_tensors as slice_tensors,
)
from accelerate_nb.utils.random import (
    set_seed as set_seed,
    synchronize_rng_state as synchronize_rng_state,
    synchronize_rng_states as synchronize_rng_states,
)
from accelerate_nb.utils.tqdm import tqdm as tqdm
